// A table of any length that draws only its visible rows. All rows have the same height.

import { arrange, el, markSorted, update } from "./dom.js";

const BEYOND = 10;

/**
 * columns: [{ name, number, of }…]; those with `of` can be sorted. cellsOf: a row's data, with an id -> the contents of
 * its cells. sortBy: called with the name of a column when its header is clicked.
 * Returns { element, set(rows, sort), draw() }.
 */
export function virtualTable(columns, cellsOf, sortBy) {
  let rows = [];
  let drawn = "";
  const heads = columns.map(({ name, number, of }) => el("th", { scope: "col", class: number ? "number" : "" },
    of ? el("button", { type: "button", class: "plain", click: () => sortBy(name) }, name) : name));
  const body = el("tbody");
  const table = el("table", { class: "virtual" }, el("colgroup", {}, columns.map(({ name }) => el("col", { class: `col-${name || "action"}` }))),
    el("thead", {}, el("tr", {}, heads)), body);
  const element = el("div", { class: "scrolls tall", tabindex: "0", role: "region", "aria-label": "Batches" }, table);
  const gap = (height) => {
    const row = el("tr", { "aria-hidden": "true", class: "gap" });
    row.style.height = `${height}px`;
    return row;
  };
  const rowHeight = () => Number.parseFloat(getComputedStyle(element).getPropertyValue("--row-height"));

  const draw = () => {
    const height = rowHeight();
    const begin = Math.max(0, Math.floor(element.scrollTop / height) - BEYOND);
    const end = Math.min(rows.length, Math.ceil((element.scrollTop + element.clientHeight) / height) + BEYOND);
    if (drawn === `${begin} ${end}`) return;
    drawn = `${begin} ${end}`;
    const before = new Map([...body.rows].map((row) => [row.dataset.id, row]));
    const shown = rows.slice(begin, end).map((row, i) => {
      const cells = cellsOf(row).map((cell, column) => el("td", { class: columns[column].number ? "number" : "" }, cell));
      const line = before.get(row.id) ?? el("tr", { "data-id": row.id });
      line.setAttribute("aria-rowindex", String(begin + i + 2));
      return update(line, cells);
    });
    arrange(body, [gap(begin * height), ...shown, gap((rows.length - end) * height)]);
  };
  element.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  new ResizeObserver(draw).observe(element);

  return {
    element,
    draw,
    set(next, sort) {
      rows = next;
      drawn = "";
      table.setAttribute("aria-rowcount", String(rows.length + 1));
      markSorted(heads, columns.map(({ name }) => name), sort);
      draw();
    },
  };
}
