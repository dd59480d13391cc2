// Markdown as elements, for reading what a model wrote. Its text is untrusted: it only ever becomes text of elements, links
// stay text, and HTML is shown as it stands.

import { el, multiline } from "./dom.js";

const FENCE = /^ {0,3}(```+|~~~+)/;
const HEADING = /^ {0,3}#{1,6}\s(.*)$/;
const ITEM = /^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}(---|\*\*\*|___)[-*_ ]*$/;
const ROW = /^\s*\|.*\|\s*$/;
// Bounded: a hostile text must not keep the page busy.
const INLINE = /(`{1,3})(.{1,500}?)\1|\*\*(?=\S)(.{1,500}?)\*\*|\*(?=\S)(.{1,500}?)\*/gs;

/** The blocks of a text: headings, lists, quotes, tables, code and paragraphs. */
export function markdown(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let at = 0;
  const take = (matches) => {
    const begin = at;
    while (at < lines.length && matches(lines[at])) at++;
    return lines.slice(begin, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at++;
    else if (RULE.test(line)) blocks.push(take((each) => RULE.test(each)) && el("hr"));
    else if (FENCE.test(line)) blocks.push(code(take(within(groupOf(FENCE, line)))));
    else if (HEADING.test(line)) blocks.push(el("h4", {}, inline(groupOf(HEADING, lines[at++]).trim())));
    else if (ROW.test(line)) blocks.push(table(take((each) => ROW.test(each))));
    else if (QUOTE.test(line)) blocks.push(el("blockquote", {}, inline(take((each) => QUOTE.test(each)).map((each) => groupOf(QUOTE, each)).join("\n"))));
    else if (ITEM.test(line)) blocks.push(list(take((each) => ITEM.test(each))));
    else blocks.push(el("p", {}, inline([lines[at++], ...take(continues)].join("\n"))));
  }
  return blocks;
}

/** What the first group of an expression matches in a line that it matches. @param {RegExp} expression @param {string} line */
const groupOf = (expression, line) => expression.exec(line)?.[1] ?? "";

const continues = (line) => line.trim() && ![FENCE, RULE, HEADING, ROW, QUOTE, ITEM].some((each) => each.test(line));

/** Whether the next line is in a block of code: from its opening fence to the closing one, if it has one. */
function within(fence) {
  let fences = 0;
  let closed = false;
  return (line) => {
    if (closed) return false;
    closed = line.trim() === fence && fences > 0;
    fences += 1;
    return true;
  };
}

function code([, ...lines]) {
  const closed = FENCE.test(lines.at(-1) ?? "");
  return el("pre", {}, multiline(lines.slice(0, closed ? -1 : undefined).join("\n")));
}

function list(lines) {
  const items = lines.map((line) => ITEM.exec(line));
  const [, first] = items[0];
  return el(first ? "ol" : "ul", first ? { start: first } : {}, items.map(([, , text]) => el("li", {}, inline(text))));
}

function table(lines) {
  const rows = lines.filter((line) => !/^[\s|:-]+$/.test(line)).map((line) => line.trim().slice(1, -1).split("|"));
  return el("table", {}, el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell) => el("td", {}, inline(cell.trim())))))));
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , span, strong, emphasis] = match;
    parts.push(multiline(text.slice(end, match.index)));
    parts.push(span ? el("code", {}, multiline(span)) : strong ? el("b", {}, inline(strong)) : el("em", {}, multiline(emphasis)));
    end = match.index + whole.length;
  }
  return [...parts, multiline(text.slice(end))];
}
