// Markdown -> DOM nodes, block by block: what models write of CommonMark and of GitHub's tables, and formulas. A text that
// grows is drawn anew only from its last blocks on (`Growing`), so a long answer costs no more than a short one.

import { block } from "/ui/chat/code.js";
import { inline } from "/ui/chat/inline.js";
import { formula } from "/ui/chat/math.js";

const FENCE = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})(.*)$/, HEAD = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/, QUOTE = /^ {0,3}> ?/, UNDER = /^ {0,3}(={3,}|-{3,})[ \t]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(?=\S)|[ ]*$)/;
const CELLS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = [[/^ {0,3}\$\$/, "$$"], [/^ {0,3}\\\[/, "\\]"]];
const MOST = 12; // levels of lists and quotes in one another

/** The blocks of a text: the line that each begins in, and its node. */
function blocks(text) { return read(text.split("\n").map((line) => line.replace(/\t/g, "    ")), 0); }

const lined = (text) => text.replace(/\r\n?/g, "\n");

/** A text as nodes. */
export function nodes(text) { return blocks(lined(text)).map((one) => one.node); }

/** A box with a text that grows at its end. */
export class Growing {
  constructor(box) { Object.assign(this, { box, text: "", from: 0, kept: 0 }); }

  /** Show a text. All of it is drawn anew where it does not begin with what was shown. */
  show(grown) {
    const text = lined(grown);
    if (text === this.text) return;
    if (!text.startsWith(this.text)) {
      Object.assign(this, { from: 0, kept: 0 });
      this.box.replaceChildren();
    }
    this.text = text;
    const rest = text.slice(this.from), found = blocks(rest);
    while (this.box.childNodes.length > this.kept) this.box.lastChild.remove();
    this.box.append(...found.map((one) => one.node));
    const settled = found.length - 2; // the last may grow, and the one before it become a heading or a table
    if (settled <= 0) return;
    let at = 0;
    for (let line = found[settled].line; line; line -= 1) at = rest.indexOf("\n", at) + 1;
    this.from += at;
    this.kept += settled;
  }
}

function read(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [node, end] = (depth < MOST && (fenced(lines, at) ?? display(lines, at) ?? heading(lines, at) ?? rule(lines, at)
      ?? quote(lines, at, depth) ?? list(lines, at, depth) ?? table(lines, at) ?? indented(lines, at))) || paragraph(lines, at);
    found.push({ line: at, node });
    at = end;
  }
  return found;
}

const made = (tag, ...inner) => {
  const node = document.createElement(tag);
  node.append(...inner);
  return node;
};
const indent = (line) => line.length - line.trimStart().length;

function fenced(lines, at) {
  const found = FENCE.exec(lines[at]);
  if (!found) return null;
  const [, lead, mark, info] = found, close = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}[ \\t]*$`), body = [];
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) {
    const line = lines[end];
    body.push(line.slice(Math.min(lead.length, indent(line))));
    end += 1;
  }
  return [block(body.join("\n"), info.trim().split(/\s+/)[0]), Math.min(end + 1, lines.length)];
}

/** A formula on lines of its own. One that has not ended is a block, too: more of it may come. */
function display(lines, at) {
  const [open, close] = MATH.find(([mark]) => mark.test(lines[at])) ?? [];
  if (!open) return null;
  const body = [];
  for (let end = at; end < lines.length; end += 1) {
    const line = end === at ? lines[end].replace(open, "") : lines[end], stop = line.indexOf(close);
    if (end > at && !line.trim()) {
      if (lines.slice(end).some((one) => one.trim())) return null;
      break;
    }
    if (stop < 0) {
      body.push(line);
      continue;
    }
    body.push(line.slice(0, stop));
    const source = body.join("\n"), whole = lines.slice(at, end + 1).join("\n");
    if (!source.trim() || line.slice(stop + close.length).trim()) return null; // text follows: it is part of a paragraph
    return [made("p", formula(source, true, whole)), end + 1];
  }
  const begun = made("p", lines.slice(at).join("\n").trimEnd());
  begun.className = "begun";
  return [begun, lines.length];
}

function heading(lines, at) {
  const found = HEAD.exec(lines[at]);
  return found && [made(`h${found[1].length}`, ...inline((found[2] ?? "").trim())), at + 1];
}

function rule(lines, at) { return RULE.test(lines[at]) ? [made("hr"), at + 1] : null; }

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  const body = [];
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (end > at && lazy(lines, end, body.at(-1))))) {
    body.push(lines[end].replace(QUOTE, ""));
    end += 1;
  }
  return [made("blockquote", ...read(body, depth + 1).map((one) => one.node)), end];
}

/** Whether a line goes on with the paragraph that ended the quote or the item before it. */
const lazy = (lines, at, before) => Boolean(lines[at].trim()) && Boolean(before?.trim()) && !begins(lines[at])
  && !FENCE.test(before) && !HEAD.test(before);

const begins = (line) => FENCE.test(line) || HEAD.test(line) || RULE.test(line) || QUOTE.test(line)
  || MATH.some(([open]) => open.test(line)) || interrupts(line);

/** A list interrupts a paragraph only where it says something, and numbers only from 1 on. */
const interrupts = (line) => {
  const found = ITEM.exec(line);
  return Boolean(found?.[3]) && found[1].length < 4 && (!/\d/.test(found[2]) || parseInt(found[2], 10) === 1);
};

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || first[1].length > 3 || RULE.test(lines[at])) return null;
  const kind = first[2].at(-1), ordered = /\d/.test(first[2]), items = [];
  const sibling = (line) => {
    const found = ITEM.exec(line);
    return found?.[2].at(-1) === kind && found[1].length <= first[1].length + 1 && !RULE.test(line) ? found : null;
  };
  let end = at, loose = false, gap = false;
  while (end < lines.length) {
    const found = sibling(lines[end]);
    if (!found) break;
    if (items.length && gap) loose = true;
    const width = found[1].length + found[2].length + (found[3]?.length > 4 ? 1 : found[3]?.length ?? 1);
    const least = Math.min(width, found[1].length + 2), body = [lines[end].slice(width)];
    let open = FENCE.exec(body[0])?.[2] ?? "";
    gap = false;
    for (end += 1; end < lines.length; end += 1) {
      const line = lines[end], deep = indent(line);
      if (!line.trim()) {
        if (!lines.slice(end).some((one) => one.trim())) break;
        gap = true;
        body.push("");
        continue;
      }
      if (deep < least && (gap || open || sibling(line) || !lazy(lines, end, body.at(-1)))) break;
      if (gap) loose ||= !open;
      gap = false;
      const inner = line.slice(Math.min(deep, width)), mark = FENCE.exec(inner)?.[2];
      if (mark) open = open ? (mark.startsWith(open) ? "" : open) : mark;
      body.push(inner);
    }
    while (body.length && !body.at(-1).trim()) body.pop();
    items.push(body);
  }
  const tag = made(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) tag.start = parseInt(first[2], 10);
  for (const body of items) tag.append(item(body, loose, depth));
  return [tag, end];
}

function item(body, loose, depth) {
  const task = /^\[([ xX])\] +/.exec(body[0] ?? ""), inner = task ? [body[0].slice(task[0].length), ...body.slice(1)] : body;
  const node = made("li");
  if (task) node.append(task[1] === " " ? "☐ " : "☑ ");
  for (const { node: part } of read(inner, depth + 1)) {
    if (part.tagName === "P" && !loose) node.append(...part.childNodes);
    else node.append(part);
  }
  return node;
}

function table(lines, at) {
  if (!lines[at].includes("|") || !CELLS.test(lines[at + 1] ?? "") || !/[|:]/.test(lines[at + 1])) return null;
  const head = cells(lines[at]), aligned = cells(lines[at + 1]).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "");
  if (head.length !== aligned.length) return null;
  const row = (tag, texts) => made("tr", ...head.map((_, i) => {
    const cell = made(tag, ...inline(texts[i] ?? ""));
    if (aligned[i]) cell.className = aligned[i];
    return cell;
  }));
  const body = made("tbody");
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) {
    body.append(row("td", cells(lines[end])));
    end += 1;
  }
  const box = made("div", made("table", made("thead", row("th", head)), body));
  box.className = "table";
  box.tabIndex = 0; // it scrolls where it is wider than the chat
  return [box, end];
}

/** The cells of a row, divided by `|` where no backslash precedes it. */
const cells = (line) => line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/)
  .map((cell) => cell.trim().replaceAll("\\|", "|"));

function indented(lines, at) {
  if (indent(lines[at]) < 4) return null;
  let end = at;
  while (end < lines.length && (indent(lines[end]) >= 4 || !lines[end].trim())) end += 1;
  while (!lines[end - 1].trim()) end -= 1;
  return [block(lines.slice(at, end).map((line) => line.slice(4)).join("\n"), ""), end];
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end]) && !UNDER.test(lines[end])) {
    if (table(lines, end)) break;
    end += 1;
  }
  const words = lines.slice(at, end).map((line) => line.trim()).join("\n"), under = UNDER.exec(lines[end] ?? "");
  if (under) return [made(under[1][0] === "=" ? "h1" : "h2", ...inline(words)), end + 1];
  return [made("p", ...inline(words)), end];
}
