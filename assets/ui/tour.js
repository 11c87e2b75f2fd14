// "Watch it work": the demo answers a few questions with all of its experts in memory, with a quarter, and with all
// again, while captions say what the live view shows. Everything is done through the page's own controls.

const STEPS = [
  { percent: 100, questions: 3, text: "All experts are in device memory. Every request for one is a hit, and nothing is copied." },
  { percent: 25, questions: 5, text: "Now a quarter of them has room. A missing expert is copied first, and another one leaves: see the map, the hit rate and the link." },
  { percent: 100, questions: 4, text: "All of the memory again. The map fills up, the copies end, and the answers stayed the same all along." },
];
const READ_MS = 6000, LOOK_MS = 50, LONGEST_MS = 60_000;
const sleep = (ms) => new Promise((done) => { setTimeout(done, ms); });
const at = (selector) => document.querySelector(selector);
let running = false;

/** Listen, once for each page. */
export function start() {
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-tour]") && !running) tour();
  });
}

async function tour() {
  running = true;
  const questions = [...document.querySelectorAll("[data-ask]")].map((one) => one.dataset.ask);
  const byHand = Boolean(at("#reset-preset")?.offsetParent), before = at("#set-budget input[type=range]").value, box = caption();
  let asked = 0;
  try {
    for (const [i, { percent, questions: count, text }] of STEPS.entries()) {
      box.firstElementChild.textContent = `${i + 1} of ${STEPS.length}: ${text}`;
      enter("#set-budget input[type=range]", percent);
      const read = sleep(READ_MS);
      for (let n = 0; n < count && running; n++) await ask(questions[asked++ % questions.length]);
      if (running) await read;
    }
  } finally {
    if (byHand) enter("#set-budget input[type=range]", before);
    else at("#reset-preset")?.click(); // the memory that Auto takes
    box.remove();
    running = false;
  }
}

/** Ask as the user does, and wait for the answer. */
async function ask(question) {
  const answers = () => document.querySelectorAll("#chat .bot-row").length, before = answers(), since = performance.now();
  enter("#message textarea", question);
  at("#send").click();
  while (running && (answers() === before || document.body.dataset.answering === "1")) {
    if (performance.now() - since > LONGEST_MS) running = false;
    await sleep(LOOK_MS);
  }
}

function enter(selector, value) {
  const field = at(selector);
  field.value = value;
  field.dispatchEvent(new Event("input", { bubbles: true }));
}

function caption() {
  const box = document.createElement("div"), end = document.createElement("button");
  box.className = "tour-caption";
  box.setAttribute("role", "status");
  Object.assign(end, { type: "button", textContent: "End the tour", onclick: () => { running = false; } });
  box.append(document.createElement("p"), end);
  document.body.append(box);
  return box;
}
