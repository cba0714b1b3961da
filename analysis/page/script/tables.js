// Tables that the reader can sort by their headings, search, and copy row by row as Markdown.

const FIRST = matchMedia("(max-width: 900px)").matches ? 5 : 12; // rows that a table shows at first
const PAGE = 100; // rows that each press of "More rows" adds

// Escapes text for Markdown, so that it neither ends a cell nor fetches a picture where it is
// pasted.
const plain = (text) => text.replaceAll(/[\\`*<\]|&]/g, "\\$&").replaceAll(/\s+/g, " ");

// A new element of the page. Its text is never read as markup.
function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// A table that the reader can sort by its headings and search. A column has a title, a function
// `text` of a row and, if it is sorted as a number, a function `value` of a row. If a column has a
// function `choose`, its cells are buttons that call it with the row.
class Table {
  // The table fills the element `place`. `copies` gives each row a button that copies it, `tools`
  // adds a search field, and `first` is the number of rows that are shown before "More rows" is
  // pressed. `sorted` is the position of the column that sorts the rows, null for their original
  // order; `down` puts large values first.
  constructor(place, name, columns, { copies = false, tools = true, first = FIRST } = {}) {
    Object.assign(this, { place, name, columns, copies, first, rows: [], sorted: null, down: true });
    this.search = element("input", "", { type: "search", "aria-label": `Search ${name}` });
    this.search.placeholder = "Search";
    this.search.addEventListener("input", () => this.draw());
    this.counts = element("output", "", { "aria-live": "polite" });
    this.more = element("button", "More rows", { type: "button" });
    this.more.addEventListener("click", () => this.draw(this.shown + PAGE));
    const scroll = element("div", "", { class: "scroll", tabindex: "0", "aria-label": name });
    scroll.setAttribute("role", "region");
    this.table = element("table");
    scroll.append(this.table);
    const line = element("p");
    line.append(this.search, " ", this.counts);
    line.hidden = !tools;
    place.replaceChildren(line, scroll, this.more);
  }

  set(rows) {
    this.rows = rows;
    this.draw();
  }

  // The rows that contain the searched text, in the chosen order.
  matchingRows() {
    const searched = this.search.value.trim().toLowerCase();
    const matches = (row) =>
      this.columns.some((column) => column.text(row).toLowerCase().includes(searched));
    const rows = searched ? this.rows.filter(matches) : [...this.rows];
    const column = this.columns[this.sorted];
    if (column) {
      const keyOf = column.value ?? column.text;
      const keys = new Map(rows.map((row) => [row, keyOf(row)]));
      const sign = this.down ? -1 : 1;
      rows.sort((a, b) => {
        const [first, second] = [keys.get(a), keys.get(b)];
        // Rows without a value come last in either direction.
        if (first === null || second === null) return (first === null) - (second === null);
        return sign * (typeof first === "string" ? first.localeCompare(second) : first - second);
      });
    }
    return rows;
  }

  // Draws the head and the first `count` matching rows.
  draw(count = this.first) {
    const rows = this.matchingRows();
    this.shown = Math.min(count, rows.length);
    this.counts.textContent = `${this.shown} of ${rows.length.toLocaleString("en")} rows`;
    this.more.hidden = this.shown === rows.length;
    const head = element("tr");
    for (const [position, column] of this.columns.entries()) {
      const cell = element("th", "", { class: column.value ? "number" : "", scope: "col" });
      const mark = position === this.sorted ? (this.down ? " ↓" : " ↑") : "";
      const button = element("button", column.title + mark, { type: "button" });
      button.addEventListener("click", () => this.sort(position));
      if (mark) cell.setAttribute("aria-sort", this.down ? "descending" : "ascending");
      cell.append(button);
      head.append(cell);
    }
    if (this.copies) head.append(element("th", "", { scope: "col" }));
    const top = element("thead");
    top.append(head);
    const body = element("tbody");
    for (const row of rows.slice(0, this.shown)) body.append(this.line(row));
    this.table.replaceChildren(top, body);
  }

  // A row of the table as an element.
  line(row) {
    const line = element("tr");
    for (const column of this.columns) {
      const cell = element("td", column.text(row), { class: column.value ? "number" : "" });
      cell.dataset.label = column.title;
      if (column.choose) {
        const button = element("button", column.text(row), { type: "button" });
        button.addEventListener("click", () => column.choose(row));
        cell.replaceChildren(button);
      }
      line.append(cell);
    }
    if (this.copies) {
      const button = element("button", "Copy", { type: "button", class: "copy" });
      button.title = "Copy this row as Markdown";
      button.addEventListener("click", () => this.copy(row, button));
      const cell = element("td");
      cell.append(button);
      line.append(cell);
    }
    return line;
  }

  // Sorts by the column at a position: numbers begin with the largest, strings with A. Sorting by the
  // same column again reverses the order.
  sort(position) {
    this.down = position === this.sorted ? !this.down : Boolean(this.columns[position].value);
    this.sorted = position;
    this.draw();
    // The headings were drawn again, so the pressed button is a new element, which needs the focus.
    this.table.querySelectorAll("th button")[position].focus();
  }

  // Copies a row with the headings, as a Markdown table.
  async copy(row, button) {
    const line = (texts) => `| ${texts.join(" | ")} |`;
    const titles = this.columns.map((column) => plain(column.title));
    const cells = this.columns.map((column) => plain(column.text(row)));
    const text = [line(titles), line(titles.map(() => "---")), line(cells)].join("\n");
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // Some browsers do not let a page from the disk write to the clipboard.
      const area = element("textarea", text);
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
  }
}
