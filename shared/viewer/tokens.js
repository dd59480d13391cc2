// The tokens of a completion, drawn in pieces as they become visible: a group may have a quarter of a million.

import { el } from "./dom.js";
import { visibleToken } from "./text.js";

// A piece ends at the first line break after PIECE tokens, or at LONGEST.
const PIECE = 192;
const LONGEST = 384;
// Off-screen pieces that stay drawn; limited, since each token is an element.
const KEPT = 160;
const CHARACTERS_PER_LINE = 44;
const LINE_HEIGHT = 24;

/**
 * row: of GET /v1/batches/{id}/tokens. classOf: index of a token -> its colour class. Returns { element, paint(classOf),
 * mark(indexes), current(index), indexOf(element) }. The view's `pieceWatcher` draws the pieces.
 */
export function tokenText(row, watcher, classOf) {
  const state = { row, classOf, hits: new Set(), current: -1 };
  const element = el("div", { class: "tokens", tabindex: "0", role: "group" });
  const pieces = cut(row).map(([begin, end]) => watcher.add(state, begin, end));
  element.append(...pieces.map((piece) => piece.element));
  const repaint = () => pieces.forEach((piece) => piece.paint());
  const pieceWith = (index) => pieces.find((piece) => index >= piece.begin && index < piece.end);
  return {
    element,
    paint(next) {
      state.classOf = next;
      repaint();
    },
    mark(hits) {
      state.hits = hits;
      repaint();
    },
    /** Selects a token, draws it, and returns its element. */
    current(index) {
      const old = pieceWith(state.current);
      state.current = index;
      old?.paint();
      const piece = pieceWith(index);
      if (!piece) return null;
      piece.draw();
      piece.paint();
      return piece.element.children[index - piece.begin];
    },
    indexOf(token) {
      const piece = pieces.find((each) => each.element === token.parentElement);
      return piece ? piece.begin + [...token.parentElement.children].indexOf(token) : -1;
    },
  };
}

/** Draws pieces as they become visible, until the signal aborts. */
export function pieceWatcher(signal) {
  const pieceOf = new WeakMap();
  const drawn = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const piece = pieceOf.get(target);
      drawn.delete(piece); // re-added below: the set is ordered by when a piece was last visible
      if (isIntersecting) piece.draw();
      if (piece.isDrawn) drawn.add(piece);
    }
    for (const piece of drawn) {
      if (drawn.size <= KEPT) break;
      piece.clear();
      drawn.delete(piece);
    }
  }, { rootMargin: "600px 0px" });
  signal.addEventListener("abort", () => observer.disconnect());
  return {
    add(state, begin, end) {
      const piece = new Piece(state, begin, end);
      pieceOf.set(piece.element, piece);
      observer.observe(piece.element);
      return piece;
    },
  };
}

class Piece {
  constructor(state, begin, end) {
    this.state = state;
    this.begin = begin;
    this.end = end;
    this.isDrawn = false;
    this.element = document.createElement("div");
    this.reserve(LINE_HEIGHT * linesOf(state.row, begin, end));
  }

  draw() {
    if (this.isDrawn) return;
    const { row } = this.state;
    const tokens = [];
    for (let i = this.begin; i < this.end; i++) {
      const token = document.createElement("span");
      token.textContent = visibleToken(row.tokens[i], row.ids[i]);
      token.className = classesOf(this.state, i);
      tokens.push(token);
    }
    this.element.replaceChildren(...tokens);
    this.element.style.minHeight = "";
    this.isDrawn = true;
  }

  clear() {
    this.reserve(this.element.offsetHeight);
    this.element.replaceChildren();
    this.isDrawn = false;
  }

  paint() {
    if (!this.isDrawn) return;
    [...this.element.children].forEach((token, i) => (token.className = classesOf(this.state, this.begin + i)));
  }

  reserve(height) {
    this.element.style.minHeight = `${height}px`;
  }
}

function classesOf({ row, classOf, hits, current }, i) {
  const masked = row.loss_mask?.[i] === false;
  const classes = [masked ? "masked" : classOf(i)];
  if (!row.tokens[i]) classes.push("textless");
  if (row.step_ends?.includes(i)) classes.push("step-end");
  if (hits.has(i)) classes.push("hit");
  if (i === current) classes.push("current");
  return classes.filter(Boolean).join(" ");
}

/** The pieces of a row: [[begin, end]…]. */
function cut(row) {
  const pieces = [];
  for (let begin = 0, i = 1; begin < row.ids.length; i++) {
    const long = i - begin;
    const ends = i >= row.ids.length || long >= LONGEST || (long >= PIECE && row.tokens[i - 1]?.endsWith("\n"));
    if (!ends) continue;
    pieces.push([begin, Math.min(i, row.ids.length)]);
    begin = i;
  }
  return pieces;
}

function linesOf(row, begin, end) {
  let lines = 1;
  let characters = 0;
  for (let i = begin; i < end; i++) {
    const text = row.tokens[i] ?? "#00000";
    characters += text.length;
    if (text.includes("\n") || characters > CHARACTERS_PER_LINE) {
      lines += 1;
      characters = 0;
    }
  }
  return lines;
}
