// Streams an answer into the page. Without this file the form sends a message and the
// whole answer comes as a page.
"use strict";
(() => {
  const form = document.querySelector("[data-chat]");
  const talk = document.querySelector("[data-talk]");
  const status = document.querySelector("[data-chat-status]");
  const stop = document.querySelector("[data-stop]");
  const box = form.elements.message;
  const send = form.querySelector("button.main");
  const messages = [];
  let running = null;

  function bubble(who, text) {
    const block = document.createElement("div");
    const name = document.createElement("b");
    const words = document.createElement("p");
    block.className = who === "You" ? "said said-user" : "said";
    name.textContent = who;
    words.textContent = text;
    block.append(name, words);
    talk.querySelector("[data-empty]")?.remove();
    talk.append(block);
    talk.scrollTop = talk.scrollHeight;
    return words;
  }

  function complain(text) {
    const note = document.createElement("div");
    note.className = "note note-error";
    note.setAttribute("role", "alert");
    note.textContent = text;
    talk.append(note);
    talk.scrollTop = talk.scrollHeight;
  }

  async function* lines(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) yield JSON.parse(part);
    }
  }

  async function ask() {
    const text = box.value.trim();
    if (!text || running) return;
    running = new AbortController();
    send.disabled = true;
    stop.hidden = false;
    status.textContent = "The model writes.";
    messages.push({ role: "user", content: text });
    bubble("You", text);
    box.value = "";
    const words = bubble("Model", "");
    tokens.watch(words);
    // Read as a whole when it is done, not letter by letter.
    talk.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(form.action, {
        method: "POST",
        credentials: "same-origin",
        headers: { "content-type": "application/json" },
        // An odd number of the newest: the first of them is the user's.
        body: JSON.stringify({ model: form.elements.model.value, messages: messages.slice(-31) }),
        signal: running.signal,
      });
      if (!answer.ok) throw new Error(`the dashboard refuses this message (status ${answer.status})`);
      let whole = false;
      for await (const line of lines(answer.body)) {
        if (line.error) throw new Error(line.error);
        if (line.done) whole = true;
        if (line.text) tokens.add(words, line);
        talk.scrollTop = talk.scrollHeight;
      }
      if (!whole) throw new Error("the answer broke off");
      status.textContent = "The answer is complete.";
    } catch (error) {
      const stopped = running.signal.aborted;
      status.textContent = stopped ? "Stopped." : "That did not work.";
      if (!stopped) complain(error.message);
    }
    // The server wants texts; a turn without an answer is forgotten.
    if (words.textContent.trim()) messages.push({ role: "assistant", content: words.textContent });
    else {
      messages.pop();
      words.parentElement.remove();
    }
    talk.removeAttribute("aria-busy");
    running = null;
    send.disabled = false;
    stop.hidden = true;
    box.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask();
    }
  });
  stop.addEventListener("click", () => running?.abort());
})();
