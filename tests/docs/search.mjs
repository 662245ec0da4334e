// Prints the title of the first section that the site's search finds, for each query, as JSON.
//   node search.mjs SITE QUERY...
// The theme's search runs in a worker of the browser. Here its script runs in this process.
import { readdirSync, readFileSync } from "node:fs";

const [site, ...queries] = process.argv.slice(2);
const workers = `${site}/assets/javascripts/workers`;
const script = readdirSync(workers).find((name) => name.endsWith(".js"));

let receive, answer;
globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => (receive = listener);
globalThis.postMessage = (message) => answer(message.data);
(0, eval)(readFileSync(`${workers}/${script}`, "utf8"));

// Types of messages: 0 sets the index, 2 is a query.
const ask = (type, data) =>
  new Promise((resolve) => {
    answer = resolve;
    receive({ data: { type, data } });
  });

const index = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
await ask(0, { ...index, options: {} });
const found = {};
for (const query of queries) {
  const sections = (await ask(2, query)).items[0].filter((item) => item.location.includes("#"));
  found[query] = sections[0].title.replace(/<[^>]+>/g, "");
}
console.log(JSON.stringify(found));
