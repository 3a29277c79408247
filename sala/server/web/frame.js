// The frame around a conversation: the list as a drawer on narrow screens, scrolling, how full the context is.

import { byId } from "./dom.js";
import { estimateTokens } from "./files.js";
import { formatCompact, formatCount } from "./format.js";

const NEAR_END = 80; // pixels from the end that still count as being there

export class Frame {
  constructor({ focusComposer }) {
    this.isAtEnd = true;
    byId("open-sidebar").addEventListener("click", () => this.openSidebar());
    byId("close-sidebar").addEventListener("click", () => this.closeSidebar());
    byId("veil").addEventListener("click", () => this.closeSidebar());
    byId("chat-list").addEventListener("click", (event) => {
      if (event.target.closest("a")) this.closeSidebar();
    });
    byId("scroller").addEventListener("scroll", () => this.#scrolled(), { passive: true });
    byId("to-end").addEventListener("click", () => this.scrollToEnd());
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the URL names the conversation
      focusComposer();
    });
    new ResizeObserver(() => this.isAtEnd && this.scrollToEnd()).observe(byId("thread"));
    this.#nameKeys();
  }

  #nameKeys() {
    if (!/Mac|iPhone|iPad/.test(navigator.platform)) return;
    byId("new-chat-key").textContent = "⌘ K";
    byId("keys-mod").textContent = "⌘";
  }

  get hasDrawer() {
    return document.body.classList.contains("has-drawer");
  }

  openSidebar() {
    document.body.classList.add("has-drawer");
    byId("veil").hidden = false;
    document.querySelector("main").inert = true;
    byId("open-sidebar").setAttribute("aria-expanded", "true");
    byId("close-sidebar").focus();
  }

  closeSidebar() {
    if (!this.hasDrawer) return;
    document.body.classList.remove("has-drawer");
    byId("veil").hidden = true;
    document.querySelector("main").inert = false;
    byId("open-sidebar").setAttribute("aria-expanded", "false");
    byId("open-sidebar").focus();
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = byId("scroller");
    this.isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END;
    byId("to-end").hidden = this.isAtEnd;
  }

  scrollToEnd() {
    const scroller = byId("scroller");
    scroller.scrollTop = scroller.scrollHeight;
    byId("to-end").hidden = true;
    this.isAtEnd = true;
  }

  // How much of the context the shown messages and the current draft fill. Files are counted, words are estimated.
  showContext(messages, draft, limit) {
    const last = messages.findLast((message) => message.usage);
    const used = last ? last.usage.prompt + last.usage.completion : 0;
    const after = messages.slice(last ? messages.indexOf(last) + 1 : 0);
    const added = after.reduce((sum, message) => sum + estimateTokens(message.text) + (message.files ?? []).reduce((all, file) => all + file.tokens, 0), 0);
    const total = used + added + draft;
    byId("context").hidden = total === 0;
    const share = limit ? Math.min(1, total / limit) : 0;
    byId("context-fill").style.width = `${share * 100}%`;
    byId("context").classList.toggle("is-tight", share > 0.85);
    byId("context-text").textContent = limit ? `${formatCompact(total)} of ${formatCompact(limit)} tokens` : `${formatCompact(total)} tokens`;
    byId("context").title = limit ? `${formatCount(total)} of ${formatCount(limit)} tokens of context` : "";
  }
}
