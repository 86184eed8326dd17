// Shows an answer token by token, and what might have stood in the place of each.
"use strict";
const tokens = (() => {
  const panel = document.querySelector("[data-inspect]");
  const top = panel.querySelector("[data-top]");
  // Least probability of each step of the underline, from sure to surprising.
  const STEPS = [0.9, 0.6, 0.3, 0.1];
  const told = new WeakMap();
  let chosen = null;

  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  // A space or a line's end would not be seen.
  const spelled = (text) => JSON.stringify(text);

  function inspect(mark) {
    chosen?.removeAttribute("data-chosen");
    chosen = mark;
    mark.setAttribute("data-chosen", "");
    const token = told.get(mark);
    panel.querySelector("[data-token]").textContent = spelled(token.text);
    panel.querySelector("[data-share]").textContent = percent(token.share);
    top.replaceChildren(...token.top.map(([text, share]) => {
      const row = document.createElement("tr");
      const name = document.createElement("th");
      const code = document.createElement("code");
      const number = document.createElement("td");
      const last = document.createElement("td");
      const bar = document.createElement("meter");
      name.scope = "row";
      code.textContent = spelled(text);
      name.append(code);
      number.className = "n";
      number.textContent = percent(share);
      bar.className = "bar";
      bar.max = 1;
      bar.value = share;
      bar.setAttribute("aria-label", spelled(text));
      last.append(bar);
      row.append(name, number, last);
      return row;
    }));
    panel.hidden = false;
  }

  function mark(text, token) {
    const found = document.createElement("span");
    found.className = "token";
    found.textContent = text;
    const step = STEPS.findIndex((least) => token.share >= least);
    found.dataset.sure = String(step < 0 ? STEPS.length : step);
    told.set(found, token);
    return found;
  }

  // Adds what has come to an answer.
  function add(words, line) {
    const all = line.tokens ?? [];
    if (all.map((token) => token.text).join("") === line.text) {
      words.append(...all.map((token) => mark(token.text, token)));
    } else if (all.length) {
      // Letters that are several tokens, or a token of which a part was left out.
      words.append(mark(line.text, all[all.length - 1]));
    } else {
      words.append(line.text);
    }
  }

  // Lets an answer be read by pointer and by keyboard.
  function watch(words) {
    words.tabIndex = 0;
    words.setAttribute("aria-description", "The arrow keys go from token to token.");
    for (const kind of ["pointerover", "click"]) {
      words.addEventListener(kind, (event) => {
        const found = event.target.closest(".token");
        if (found) inspect(found);
      });
    }
    words.addEventListener("keydown", (event) => {
      const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const all = [...words.querySelectorAll(".token")];
      if (!way || !all.length) return;
      event.preventDefault();
      const here = all.indexOf(chosen);
      inspect(all[here < 0 ? 0 : Math.min(Math.max(here + way, 0), all.length - 1)]);
    });
  }

  return { add, watch };
})();
