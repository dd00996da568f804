// Marks the page in the contents, and searches the book: every word must be in the section.
const here = location.pathname.split("/").pop() || "index.html";
for (const link of document.querySelectorAll("nav a")) {
  if (link.getAttribute("href") === here) link.setAttribute("aria-current", "page");
}
const contents = document.getElementById("contents");
if (window.matchMedia("(max-width: 52rem)").matches) contents.open = false;

const field = document.getElementById("search");
const results = document.getElementById("results");
let sections;

async function load() {
  sections ??= fetch("search.json").then((answer) => answer.json());
  return sections;
}

function score(section, words) {
  let sum = 0;
  for (const word of words) {
    const inTitle = section.title.toLowerCase().includes(word);
    const inText = section.text.toLowerCase().includes(word);
    if (!inTitle && !inText) return 0;
    sum += inTitle ? 10 : 1;
  }
  return sum;
}

async function search() {
  const words = field.value.toLowerCase().split(/\s+/).filter((word) => word.length > 1);
  const found = words.length === 0 ? [] : (await load())
    .map((section) => ({ section, score: score(section, words) }))
    .filter((hit) => hit.score > 0)
    .sort((a, b) => b.score - a.score)
    .slice(0, 20);
  results.replaceChildren(...found.map(({ section }) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = section.link;
    link.textContent = section.title;
    const page = document.createElement("small");
    page.textContent = section.page;
    link.append(page);
    item.append(link);
    return item;
  }));
  results.hidden = found.length === 0;
}

field.hidden = false;
field.addEventListener("input", search);
field.addEventListener("focus", load);
document.addEventListener("click", (event) => { if (!event.target.closest(".search")) results.hidden = true; });
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement === document.body) { event.preventDefault(); field.focus(); }
  if (event.key === "Escape") results.hidden = true;
});
