// An answer: the model's reasoning, folded, and what it says, both as Markdown; the same while it grows and afterwards.

import { Growing } from "/ui/chat/markdown.js";

const THINK = "<think>", THOUGHT = "</think>";

/** An answer's text -> its reasoning, what it says, and whether it is still reasoning. `opened`: it starts in the middle
 *  of the reasoning; `ended`: no more of it comes. */
export function split(text, opened, ended) {
  const lead = text.trimStart();
  let rest = null;
  if (lead.startsWith(THINK)) rest = lead.slice(THINK.length);
  else if (!ended && !opened && THINK.startsWith(lead)) return { thought: "", said: "", thinking: false };
  else if (opened || text.includes(THOUGHT)) rest = text;
  if (rest === null) return { thought: "", said: text, thinking: false };
  const end = rest.indexOf(THOUGHT);
  if (end < 0) return { thought: rest, said: "", thinking: !ended };
  return { thought: rest.slice(0, end), said: rest.slice(end + THOUGHT.length).replace(/^\n+/, ""), thinking: false };
}

/** Draws an answer into a box. */
export class AnswerView {
  constructor(box) {
    this.fold = document.createElement("details");
    this.summary = document.createElement("summary");
    const thoughts = document.createElement("div"), words = document.createElement("div");
    thoughts.className = words.className = "md";
    this.fold.className = "reasoning";
    this.fold.hidden = true;
    this.fold.append(this.summary, thoughts);
    [this.thoughts, this.words] = [new Growing(thoughts), new Growing(words)];
    this.fold.addEventListener("toggle", () => this.think());
    box.replaceChildren(this.fold, words);
  }

  show(text, opened, ended) {
    const { thought, said, thinking } = split(text, opened, ended);
    this.thought = thought.trim();
    this.fold.hidden = !this.thought && !thinking;
    this.fold.classList.toggle("thinking", thinking);
    const count = this.thought ? this.thought.split(/\s+/).length : 0;
    const label = this.fold.hidden ? "" : `${thinking ? "Reasoning…" : "Reasoning"} (${count} word${count === 1 ? "" : "s"})`;
    if (this.summary.textContent !== label) this.summary.textContent = label;
    this.think();
    this.words.show(said);
  }

  /** What is folded is not drawn. */
  think() {
    if (this.fold.open) this.thoughts.show(this.thought ?? "");
  }
}
