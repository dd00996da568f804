// The item of a list beside the page that is open.
import { tick } from "svelte";

/** Brings it into sight, after the page has changed. */
export async function showCurrentItem(): Promise<void> {
  await tick();
  document.querySelector(".list [aria-current]")?.scrollIntoView({ block: "nearest" });
}
