// The prompt's text in rows of tokens. A row becomes tokens when it is about to be seen; until then it is plain text.

const LONGEST_ROW = 160;
const SHORTEST_ROW = 40;
const special = new Set(data.special_tokens);

/** First tokens of the rows: they end with a line where they can, else before a word. */
function rowStarts() {
  const starts = [0];
  for (let token = 1; token < tokens; token++) {
    const length = token - starts.at(-1);
    const text = data.token_texts[token];
    const isLineEnd = length >= SHORTEST_ROW && data.token_texts[token - 1].endsWith("\n");
    const isWord = length >= LONGEST_ROW && /^\s/.test(text);
    if (text && (isLineEnd || isWord || length >= 2 * LONGEST_ROW)) starts.push(token);
  }
  return starts;
}

class PromptText {
  /** `sides` policies beside each other, whose shades `shades[side]` holds by token. */
  constructor(sides, pointAt) {
    this.shades = [];
    this.marked = null;
    this.cells = new Map();
    this.element = document.getElementById("text");
    this.element.replaceChildren();
    this.element.style.setProperty("--sides", sides);
    this.observer = new IntersectionObserver((seen) => this.onSeen(seen), { rootMargin: "600px" });
    const starts = rowStarts();
    this.rows = starts.map((start, row) => this.makeRow(start, starts[row + 1] ?? tokens, sides));
    this.element.append(...this.rows.map((row) => row.element));
    const token = ({ target }) => (target.dataset.token === undefined ? null : Number(target.dataset.token));
    this.element.onmouseover = (event) => pointAt(token(event), false);
    this.element.onmouseleave = () => pointAt(null, false);
    this.element.onclick = (event) => pointAt(token(event), true);
  }

  makeRow(start, stop, sides) {
    const element = make("div", { className: "row" });
    element.dataset.start = whole(start);
    const text = data.token_texts.slice(start, stop).join("").slice(spacesBefore(start).length) + spacesBefore(stop);
    const row = { element, start, stop, isSeen: false, isStale: true, cells: [] };
    for (let side = 0; side < sides; side++) row.cells.push(make("div", { className: "cell" }, text));
    element.append(...row.cells);
    this.cells.set(element, row);
    this.observer.observe(element);
    return row;
  }

  onSeen(entries) {
    for (const { target, isIntersecting } of entries) {
      const row = this.cells.get(target);
      row.isSeen = isIntersecting;
      if (isIntersecting) this.paint(row);
    }
  }

  /** Show other shades: rows in view now, the others when they are seen. */
  shadeBy(shades) {
    this.shades = shades;
    for (const row of this.rows) {
      row.isStale = true;
      if (row.isSeen) this.paint(row);
    }
  }

  paintAll() {
    this.rows.forEach((row) => this.paint(row));
  }

  paint(row) {
    if (!row.isStale || !this.shades.length) return;
    row.isStale = false;
    row.cells.forEach((cell, side) => {
      if (!cell.firstElementChild) cell.replaceChildren(...tokenSpans(row.start, row.stop));
      for (const span of cell.children) {
        const token = Number(span.dataset.token);
        span.className = `shade-${this.shades[side][token]} ${span.dataset.more ?? ""}`;
        span.classList.toggle("at", token === this.marked);
      }
    });
  }

  /** Outline a token, or none (null). */
  mark(token) {
    this.element.querySelectorAll(".at").forEach((span) => span.classList.remove("at"));
    this.marked = token === null ? null : characterOf(token);
    this.spansOf(this.marked).forEach((span) => span.classList.add("at"));
  }

  spansOf(token) {
    return this.element.querySelectorAll(`[data-token="${token}"]`);
  }

  /** Scroll to a token. */
  goTo(token) {
    const row = this.rows.findLast(({ start }) => start <= token);
    this.paint(row);
    row.element.scrollIntoView({ block: "center" });
  }
}

/** The token that the text of a token stands with: parts of a character have none themselves. */
function characterOf(token) {
  while (token > 0 && !data.token_texts[token]) token--;
  return token;
}

/** The spaces in front of a token's word. They are not shaded, and stand in the row before if the token begins one. */
function spacesBefore(token) {
  return token < tokens ? (data.token_texts[token].match(/^ *(?=\S)/)?.[0] ?? "") : "";
}

function tokenSpans(start, stop) {
  const spans = [];
  for (let token = start; token < stop; token++) {
    const text = data.token_texts[token];
    if (!text) continue;
    const spaces = spacesBefore(token);
    if (token > start) spans.push(spaces);
    const span = make("span", {}, text.slice(spaces.length));
    span.dataset.token = token;
    const more = [];
    if (special.has(token)) more.push("special");
    if (text.startsWith("\n")) more.push("newline");
    if (edges.has(token)) more.push("edge");
    if (token === branchesAt) more.push("branch");
    if (more.length) span.dataset.more = more.join(" ");
    spans.push(span);
  }
  spans.push(spacesBefore(stop));
  return spans;
}
