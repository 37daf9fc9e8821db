"use strict";
// Conveniences only: the page opens, filters and reads the same without them.
document.documentElement.classList.add("scripted");
const said = document.getElementById("said");

async function copy(button) {
  const command = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(command.textContent);
    button.textContent = "Copied";
    said.textContent = "The command was copied.";
  } catch {
    getSelection().selectAllChildren(command);
    button.textContent = "Selected";
    said.textContent = "The command is selected, to be copied by key.";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

for (const button of document.querySelectorAll("button.copy")) {
  button.hidden = false;
  button.addEventListener("click", () => copy(button));
}

document.addEventListener("keydown", (event) => {
  const open = document.querySelector(".detail:target");
  if (event.key === "Escape" && open) open.querySelector(".close").click();
});
