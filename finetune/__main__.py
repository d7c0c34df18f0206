"""`python -m finetune`, which is what `accelerate launch -m finetune` runs."""

from finetune.cli import main

main()
