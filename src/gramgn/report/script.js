"use strict";
// The page is complete without this: it only makes the runs table sort and filter, and opens what a link points to.
(() => {
  const table = document.getElementById("runs");
  if (table) {
    const body = table.tBodies[0];
    const rows = Array.from(body.rows, (row, place) => ({
      row,
      place,
      words: row.textContent.toLowerCase(),
      details: document.getElementById(row.dataset.run),
    }));
    makeSortable(table, body, rows);
    makeFilterable(rows);
  }

  function makeSortable(table, body, rows) {
    const heads = Array.from(table.tHead.rows[0].cells);
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        rows.sort((a, b) => compare(a.row.cells[column], b.row.cells[column], down) || a.place - b.place);
        body.append(...rows.map((entry) => entry.row));
      });
    });
  }

  // Cells without a value stand last whichever way is sorted.
  function compare(first, second, down) {
    const [a, b] = [keyOf(first), keyOf(second)];
    if (a === null || b === null) return (a === null) - (b === null);
    const order = typeof a === "number" ? (a > b) - (a < b) : a.localeCompare(b, "en", { numeric: true });
    return down ? -order : order;
  }

  function keyOf(cell) {
    if ("key" in cell.dataset) return cell.dataset.key === "" ? null : Number(cell.dataset.key);
    const text = cell.textContent.trim();
    return text === "–" ? null : text;
  }

  function makeFilterable(rows) {
    const input = document.getElementById("filter");
    const count = document.getElementById("count");
    input.closest(".controls").hidden = false;
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const entry of rows) {
        const fits = words.every((word) => entry.words.includes(word));
        entry.row.hidden = !fits;
        if (entry.details) entry.details.hidden = !fits;
        shown += fits;
      }
      count.textContent = `${shown} of ${rows.length} runs`;
    };
    input.addEventListener("input", apply);
    // A browser that goes back fills the field in by itself.
    window.addEventListener("pageshow", apply);
    apply();
    const all = document.getElementById("open-all");
    all.addEventListener("click", () => {
      const found = rows.map((entry) => entry.details).filter((details) => details && !details.hidden);
      const open = !found.every((details) => details.open);
      found.forEach((details) => { details.open = open; });
    });
  }

  function openTarget() {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) {
      target.hidden = false;
      target.open = true;
      target.scrollIntoView();
    }
  }
  window.addEventListener("hashchange", openTarget);
  openTarget();
})();
