// Blocks of code: the language, a button that copies, and colours for what all languages have.

const C = "//", HASH = "#", DASH = "--";
const COMMENTS = { python: HASH, py: HASH, ruby: HASH, rb: HASH, sh: HASH, bash: HASH, shell: HASH, zsh: HASH, yaml: HASH,
  yml: HASH, toml: HASH, r: HASH, perl: HASH, make: HASH, dockerfile: HASH, julia: HASH, sql: DASH, lua: DASH, haskell: DASH };
const BARE = new Set(["", "text", "txt", "plain", "output", "console", "markdown", "md", "diff", "mermaid", "html", "xml"]);
const WORDS = new Set(`abstract and as assert async await auto bool break case catch char class const constexpr continue def
  default defer del delete do double elif else end enum except explicit export extends extern false final finally float fn
  for foreach from func function global go goto if implements import impl in include inline int interface is lambda let
  long match mod module mut namespace new nil none nonlocal not null nullptr operator or override package pass private
  protected pub public raise range return self short signed sizeof static struct super switch template then this throw
  trait true try type typedef typename typeof union unsafe unsigned until use using var virtual void volatile when where
  while with yield select insert update delete create table join group order by limit values set distinct having`.split(/\s+/));
const MOST = 60_000; // characters: longer ones stay in one colour

/** A block of code in a language, "" where none is named. */
export function block(text, language) {
  const box = document.createElement("div"), head = document.createElement("div"), name = document.createElement("span");
  const copy = document.createElement("button"), body = document.createElement("pre"), inner = document.createElement("code");
  box.className = "code";
  head.className = "code-head";
  name.textContent = language;
  Object.assign(copy, { type: "button", textContent: "Copy" });
  copy.dataset.copy = "code";
  copy.setAttribute("aria-label", "Copy the code");
  body.tabIndex = 0; // it scrolls, so the keyboard has to reach it
  inner.append(...coloured(text, language.toLowerCase()));
  head.append(name, copy);
  body.append(inner);
  box.append(head, body);
  return box;
}

function coloured(text, language) {
  if (BARE.has(language) || text.length > MOST) return [text];
  const line = COMMENTS[language] ?? C, star = line === C ? "|\\/\\*[\\s\\S]*?(?:\\*\\/|$)" : "";
  const pattern = new RegExp(
    `(${line === HASH ? "(?<![\\w$\\\\])#" : line}[^\\n]*${star})`
    + `|("""[\\s\\S]*?(?:"""|$)|'''[\\s\\S]*?(?:'''|$)|"(?:[^"\\\\\\n]|\\\\.)*"|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\[\\s\\S])*\`)`
    + "|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)(?=(\\s*\\())?", "g");
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(pattern)) {
    const [whole, comment, quoted, number, word, call] = found;
    const kind = comment ? "c" : quoted ? "s" : number ? "n" : WORDS.has(word) || WORDS.has(word.toLowerCase()) && language === "sql" ? "k" : call ? "f" : "";
    if (!kind) continue;
    if (found.index > end) nodes.push(text.slice(end, found.index));
    const made = document.createElement("i");
    made.className = kind;
    made.textContent = whole;
    nodes.push(made);
    end = found.index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
