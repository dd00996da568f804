import { mount } from "svelte";
import App from "./App.svelte";
import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/shell.css";
import "./styles/session.css";
import "./styles/pages.css";

const target = document.getElementById("app");
// What the page shows until the script has arrived: the first paint does not wait for it.
target?.replaceChildren();
if (target) mount(App, { target });
