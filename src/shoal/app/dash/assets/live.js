// Fetches the part of a page that changes while a run goes on. Without this file the
// reload link does the same.
"use strict";
(() => {
  const EVERY_MS = 2000;
  const place = document.querySelector("[data-live]");
  const content = document.querySelector("[data-live-content]");
  const status = document.querySelector("[data-live-status]");
  const pause = document.querySelector("[data-live-pause]");
  let paused = false;
  let timer = 0;

  function say(text) {
    // A screen reader reads each change; the same words again are no news.
    if (status.textContent !== text) status.textContent = text;
  }

  function next() {
    clearTimeout(timer);
    if (!paused) timer = setTimeout(update, EVERY_MS);
  }

  async function update() {
    if (document.hidden || content.contains(document.activeElement)) return next();
    try {
      const answer = await fetch(place.dataset.live, { credentials: "same-origin" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      content.innerHTML = await answer.text();
      const state = answer.headers.get("x-run-state");
      if (state !== "running") {
        say(`This run is over: ${state}.`);
        pause.hidden = true;
        return;
      }
      say("This run goes on; the numbers update by themselves.");
    } catch {
      say("The dashboard does not answer; trying again.");
    }
    next();
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    say(paused ? "Updates are paused." : "This run goes on; the numbers update by themselves.");
    next();
  });
  next();
})();
