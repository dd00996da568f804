// Markdown from an agent, rendered safely: parsed, highlighted, then sanitised of everything that could run.
import DOMPurify from "dompurify";
import hljs from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import rust from "highlight.js/lib/languages/rust";
import xml from "highlight.js/lib/languages/xml";
import { Marked } from "marked";

const languages = { bash, css, diff, javascript, json, python, rust, xml };
for (const [name, language] of Object.entries(languages)) hljs.registerLanguage(name, language);
hljs.registerAliases(["sh", "shell", "console"], { languageName: "bash" });
hljs.registerAliases(["js", "ts", "typescript"], { languageName: "javascript" });
hljs.registerAliases(["html", "svg"], { languageName: "xml" });
hljs.registerAliases(["py"], { languageName: "python" });
hljs.registerAliases(["rs"], { languageName: "rust" });

export function escape(text: string): string {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

/** Highlights code if its language is known and it is not too long. */
export function highlight(code: string, language?: string): string {
  if (!language || !hljs.getLanguage(language) || code.length > 50_000) return escape(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    code({ text, lang }) {
      const language = lang?.split(/\s/)[0];
      return `<pre><code class="hljs">${highlight(text, language)}</code></pre>`;
    },
    // HTML in Markdown is shown as text.
    html({ text }) {
      return escape(text);
    },
    // An image would be a request to another server, so only its name is shown.
    image({ text, href }) {
      return `<span class="image">[image: ${escape(text || href)}]</span>`;
    },
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "em", "strong", "del", "code", "pre", "span", "a", "ul", "ol", "li", "blockquote",
    "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td",
  ],
  ALLOWED_ATTR: ["href", "class", "title", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
};

/** The longest text that is rendered as Markdown, in characters; longer text is shown plain. */
const MAX_MARKDOWN_CHARS = 200_000;
/** Quotes and lists inside each other, as deep as a person would write them. */
const DEEP_NESTING = /^(?:[ \t]*(?:>|[-*+]|\d{1,9}[.)])){30}/m;

/** The parser compares the marks of emphasis of a paragraph with each other: this many comparisons take about 50 ms. */
const MAX_COMPARED_MARKS = 2_000_000;

/** Whether parsing would take so long that the page stood still. */
function isTooHard(text: string): boolean {
  if (text.length > MAX_MARKDOWN_CHARS || DEEP_NESTING.test(text)) return true;
  let compared = 0;
  for (const paragraph of text.split(/\n[ \t]*\n/)) compared += (paragraph.match(/[_*]/g)?.length ?? 0) ** 2;
  return compared > MAX_COMPARED_MARKS;
}

/** Text that is not taken for Markdown. */
const plain = (text: string): string => `<pre>${escape(text.slice(0, MAX_MARKDOWN_CHARS))}${text.length > MAX_MARKDOWN_CHARS ? "…" : ""}</pre>`;

export function render(text: string): string {
  if (isTooHard(text)) return plain(text);
  try {
    const clean = DOMPurify.sanitize(marked.parse(text, { async: false }), { ...ALLOWED, RETURN_DOM_FRAGMENT: true });
    for (const link of clean.querySelectorAll("a")) {
      link.setAttribute("target", "_blank");
      link.setAttribute("rel", "noopener noreferrer nofollow");
    }
    const holder = document.createElement("div");
    holder.append(clean);
    return holder.innerHTML;
  } catch {
    // A parser that gives up must not take the page with it.
    return plain(text);
  }
}
