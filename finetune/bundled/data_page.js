"use strict";
const $ = (s, of = document) => of.querySelector(s), $$ = (s, of = document) => [...of.querySelectorAll(s)];
const rows = $$(".row"), box = $("#find"), said = $("#said"), tip = $("#tip"), marks = self.CSS && CSS.highlights;
const texts = rows.map(row => ($("header b", row).textContent + "\n" + $("pre", row).textContent).toLowerCase());
let only = "";
function show() {
  const word = box.value.toLowerCase(), ranges = [];
  let count = 0;
  rows.forEach((row, n) => {
    const fits = (!only || row.dataset.is.split(" ").includes(only)) && texts[n].includes(word);
    row.hidden = !fits;
    count += fits;
    if (fits && word && ranges.length < 3000) find($("pre", row), word, ranges);
  });
  said.textContent = count === rows.length ? "" : count + " of " + rows.length;
  if (marks) marks.set("found", new Highlight(...ranges));
}
function find(pre, word, ranges) {
  const nodes = [], walk = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
  let all = "";
  while (walk.nextNode()) { nodes.push([all.length, walk.currentNode]); all += walk.currentNode.data; }
  const low = all.toLowerCase();
  if (low.length !== all.length) return;
  const place = at => {
    const [from, node] = nodes.findLast(pair => pair[0] <= at);
    return [node, Math.min(at - from, node.length)];
  };
  for (let at = low.indexOf(word); at >= 0; at = low.indexOf(word, at + word.length)) {
    const range = new Range();
    range.setStart(...place(at));
    const [node, offset] = place(at + word.length - 1);
    range.setEnd(node, Math.min(offset + 1, node.length));
    ranges.push(range);
  }
}
function tokens(part) {
  let at = 0;
  return (part.dataset.ids || "").split(" ").filter(Boolean).map(pair => {
    const [length, id] = pair.split(":"), from = at;
    at += +length;
    return {from, to: at, id, text: part.textContent.slice(from, at)};
  });
}
function under(x, y) {
  const at = document.caretPositionFromPoint ? document.caretPositionFromPoint(x, y) : null;
  const old = at || !document.caretRangeFromPoint ? null : document.caretRangeFromPoint(x, y);
  return at ? [at.offsetNode, at.offset] : old ? [old.startContainer, old.startOffset] : null;
}
document.addEventListener("pointermove", event => {
  const part = event.target.closest && event.target.closest("pre [data-ids]");
  const place = part && under(event.clientX, event.clientY);
  let found = null;
  if (place && part.contains(place[0]) && place[0].nodeType === 3) {
    const touched = token => {
      const range = new Range();
      range.setStart(place[0], token.from);
      range.setEnd(place[0], Math.min(token.to, place[0].length));
      const {clientX: x, clientY: y} = event;
      const holds = r => r.left <= x && x <= r.right && r.top <= y && y <= r.bottom;
      return [...range.getClientRects()].some(holds) && range;
    };
    for (const token of tokens(part)) {
      if (token.from > place[1] || token.to < place[1] - 1) continue;
      const range = touched(token);
      if (range) { found = [token, range]; break; }
    }
  }
  tip.hidden = !found;
  if (marks) { if (found) marks.set("token", new Highlight(found[1])); else marks.delete("token"); }
  if (!found) return;
  const trained = part.matches("b,u") ? "trained" : "only read";
  tip.textContent = found[0].id + "  " + JSON.stringify(found[0].text.replaceAll("\n", "")) + "  " + trained;
  tip.style.left = Math.max(8, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)) + "px";
  const below = event.clientY + 20;
  tip.style.top = (below + tip.offsetHeight > innerHeight ? event.clientY - 34 : below) + "px";
});
function list(row) {
  const old = $("ol", row);
  if (old) return old.remove();
  const made = document.createElement("ol");
  let place = 0;
  for (const part of $$("[data-ids]", row)) for (const token of tokens(part)) {
    const item = document.createElement("li");
    item.className = part.matches("b,u") ? "t" : "";
    for (const text of [place++, token.id, token.text || "\u2033"]) {
      item.appendChild(document.createElement("span")).textContent = String(text).replaceAll("\n", "");
    }
    made.appendChild(item);
  }
  row.appendChild(made);
}
let timer = 0;
box.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(show, 80); });
for (const button of $$("[data-only]")) button.addEventListener("click", () => {
  only = button.dataset.only;
  for (const other of $$("[data-only]")) other.setAttribute("aria-pressed", other === button);
  show();
});
document.addEventListener("click", event => {
  const button = event.target.closest && event.target.closest(".ids");
  if (button) list(button.closest(".row"));
});
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === box) {
    if (event.key === "Escape") { box.value = ""; show(); box.blur(); }
    return;
  }
  const here = document.activeElement.closest(".row"), seen = rows.filter(row => !row.hidden);
  const step = {j: 1, k: -1}[event.key];
  if (event.key === "/") { box.focus(); event.preventDefault(); }
  else if (event.key === "Enter" && document.activeElement === here && here) list(here);
  else if (step && seen.length) {
    const next = seen[Math.max(0, Math.min(seen.length - 1, here ? seen.indexOf(here) + step : 0))];
    next.focus({preventScroll: true});
    next.scrollIntoView({block: "nearest"});
  }
});
show();
