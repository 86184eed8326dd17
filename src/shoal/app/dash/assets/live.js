// Fetches the parts of a page that change while something goes on. Without this file the
// reload link does the same.
"use strict";
(() => {
  const EVERY_MS = 2000;
  const place = document.querySelector("[data-live]");
  const parts = document.querySelectorAll("[data-live-content]");
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

  function show(html) {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    for (const part of parts) {
      if (part.contains(document.activeElement)) continue;
      // One part without a name is all that was fetched.
      const name = part.dataset.liveContent;
      const found = name && fresh.content.querySelector(`[data-live-content="${name}"]`);
      part.innerHTML = name ? found.innerHTML : html;
    }
  }

  async function update() {
    const held = parts.length === 1 && parts[0].contains(document.activeElement);
    if (document.hidden || held) return next();
    try {
      const answer = await fetch(place.dataset.live, { credentials: "same-origin" });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      show(await answer.text());
      document.dispatchEvent(new Event("shoal:live")); // charts follow
      const state = answer.headers.get("x-run-state");
      if (state !== "running") {
        say(`${place.dataset.liveOver}: ${state}.`);
        pause.hidden = true;
        return;
      }
      say(place.dataset.liveOn);
    } catch {
      say("The dashboard does not answer; trying again.");
    }
    next();
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    say(paused ? "Updates are paused." : place.dataset.liveOn);
    next();
  });
  next();
})();
