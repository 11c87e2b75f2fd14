// The inline parts of Markdown, as DOM nodes: no text ever becomes HTML, so an answer can draw nothing of its own.

import { formula } from "/ui/chat/math.js";

const PUNCTUATION = /[!-/:-@[-`{-~]/, SPACE = /\s/, WORD = /[\p{L}\p{N}]/u;
const TAGS = { "*1": "em", "*2": "strong", "_1": "em", "_2": "strong", "~1": "del", "~2": "del" };
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
// What may begin something: everything up to the next of these is text.
const PLAIN = /[^\\`$![\]<&*_~\nhm]+/y;
// Formulas: `$` begins one where no space follows, and ends it where no space precedes and no word follows: $5 is money.
const MATH = [
  [/\\\(([\s\S]+?)\\\)/y, false],
  [/\\\[([\s\S]+?)\\\]/y, true],
  [/\$\$((?:[^$\\]|\\[\s\S])+?)\$\$/y, true],
  [/\$(?![\s$])((?:[^$\\\n]|\\.)*?[^\s$\\]|(?:[^$\\\n]|\\.)*?\\[^\s])\$(?![\p{L}\p{N}$])/uy, false],
];
const CODE = /(`+)(?!`)([\s\S]*?[^`])\1(?!`)/y;
const LINK = /(!?)\[((?:[^[\]\\]|\\[\s\S]|\[(?:[^[\]\\]|\\[\s\S])*\])*)\]\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\[\s\S]|\((?:[^\s()\\]|\\[\s\S])*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const BARE = /(?:https?:\/\/|mailto:)[^\s<>]+/y;
const BREAK = /<br\s*\/?>/iy;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,6}));/y;
const MOST = 20, FAR = 400; // levels of links and emphasis in one another; parts between two marks of emphasis

const at = (pattern, text, from) => { pattern.lastIndex = from; return pattern.exec(text); };

/** Inline Markdown -> nodes. */
export function inline(text, depth = 0) {
  const parts = [];
  let plain = "", from = 0;
  const say = (words) => { plain += words; };
  const put = (part) => {
    if (plain) parts.push(plain);
    plain = "";
    parts.push(part);
  };
  while (from < text.length) {
    const one = token(text, from, depth);
    if (typeof one.part === "string") say(one.part);
    else put(one.part);
    from = one.end;
  }
  if (plain) parts.push(plain);
  return emphasised(parts, depth);
}

/** What stands at a place: a text, a node, or a run of marks of emphasis; and where it ends. */
function token(text, from, depth) {
  const plain = at(PLAIN, text, from);
  if (plain) return { part: plain[0], end: PLAIN.lastIndex };
  const mark = text[from];
  if (mark === "\\" || mark === "$") {
    for (const [pattern, display] of MATH) {
      const found = at(pattern, text, from);
      if (found) return { part: formula(found[1], display, found[0]), end: pattern.lastIndex };
    }
  }
  if (mark === "\\") return escaped(text, from);
  if (mark === "`") {
    const found = at(CODE, text, from);
    if (found) return { part: code(found[2]), end: CODE.lastIndex };
    const run = /`+/y;
    return { part: at(run, text, from)[0], end: run.lastIndex };
  }
  if (mark === "!" || mark === "[") {
    const found = depth < MOST && at(LINK, text, from);
    if (found) return { part: link(found, depth), end: LINK.lastIndex };
  }
  if (mark === "<") {
    const found = at(ANGLE, text, from);
    if (found) return { part: anchor(found[1], [found[1]]), end: ANGLE.lastIndex };
    if (at(BREAK, text, from)) return { part: document.createElement("br"), end: BREAK.lastIndex };
  }
  if (mark === "h" || mark === "m") {
    const found = !WORD.test(text[from - 1] ?? " ") && at(BARE, text, from);
    if (found) {
      const address = trimmed(found[0]);
      return { part: anchor(address, [address]), end: from + address.length };
    }
  }
  if (mark === "&") {
    const found = at(ENTITY, text, from), character = found && entity(found);
    if (character) return { part: character, end: ENTITY.lastIndex };
  }
  if (mark === "\n") return { part: document.createElement("br"), end: from + 1 };
  if (mark === "*" || mark === "_" || mark === "~") return run(text, from);
  return { part: mark, end: from + 1 };
}

function escaped(text, from) {
  const next = text[from + 1] ?? "";
  if (next === "\n") return { part: document.createElement("br"), end: from + 2 };
  return next && PUNCTUATION.test(next) ? { part: next, end: from + 2 } : { part: "\\", end: from + 1 };
}

function code(text) {
  const line = text.replace(/\n/g, " "), made = document.createElement("code");
  made.textContent = /^ .*\S.* $/.test(line) ? line.slice(1, -1) : line;
  return made;
}

function link([, image, words, angled, bare], depth) {
  const address = (angled ?? bare).replace(/\\([!-/:-@[-`{-~])/g, "$1");
  return anchor(address, image ? [words || address] : inline(words, depth + 1)); // an image would be fetched from elsewhere
}

/** A link to another site or an address; the words alone where it leads to anything else. */
function anchor(address, words) {
  const made = document.createElement(/^(https?:\/\/|mailto:)/i.test(address) ? "a" : "span");
  if (made.tagName === "A") Object.assign(made, { href: address, target: "_blank", rel: "noopener noreferrer" });
  made.append(...words);
  return made;
}

/** An address without the punctuation of the sentence around it. */
function trimmed(address) {
  let end = address.replace(/[.,:;!?'"*_~]+$/, "");
  while (end.endsWith(")") && end.split(")").length > end.split("(").length) end = end.slice(0, -1);
  return end;
}

function entity([, decimal, hex, name]) {
  if (name) return ENTITIES[name] ?? "";
  const number = decimal ? +decimal : parseInt(hex, 16);
  return number > 0 && number < 0x110000 ? String.fromCodePoint(number) : "\ufffd";
}

/** A run of `*`, `_` or `~`: whether it may open emphasis, or close it (CommonMark, section 6.2). */
function run(text, from) {
  const mark = text[from];
  let end = from;
  while (text[end] === mark) end += 1;
  const before = text[from - 1] ?? " ", after = text[end] ?? " ";
  const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
  const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
  const within = mark === "_";
  return {
    end,
    part: {
      mark, count: end - from,
      opens: left && (!within || !right || PUNCTUATION.test(before)),
      closes: right && (!within || !left || PUNCTUATION.test(after)),
    },
  };
}

/** Texts, nodes and runs -> nodes, the runs matched from the left, each closing one with the nearest that opens. */
function emphasised(parts, depth) {
  const out = [];
  for (const part of parts) {
    if (!part.mark) {
      out.push(part);
      continue;
    }
    while (part.closes && part.count) {
      let open = out.length - 1;
      const last = Math.max(0, out.length - FAR);
      while (open >= last && !matches(out[open], part)) open -= 1;
      if (open < last || depth + nested(out.slice(open + 1)) >= MOST) break;
      const first = out[open], size = first.count >= 2 && part.count >= 2 ? 2 : 1;
      const made = document.createElement(TAGS[part.mark + size]);
      made.append(...words(out.splice(open + 1)));
      first.count -= size;
      part.count -= size;
      if (!first.count) out.pop();
      out.push(made);
    }
    if (part.count) out.push(part);
  }
  return words(out);
}

const matches = (one, close) => one.mark === close.mark && one.opens && one.count > 0
  && (close.mark !== "~" || one.count === close.count)
  && !((one.closes || close.opens) && (one.count + close.count) % 3 === 0 && (one.count % 3 || close.count % 3));

const nested = (nodes) => {
  let level = 0;
  for (let inner = nodes; inner.length; inner = inner.flatMap((node) => [...(node.childNodes ?? [])])) level += 1;
  return level;
};

const words = (parts) => parts.map((part) => (part.mark ? part.mark.repeat(part.count) : part));
