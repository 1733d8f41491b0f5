(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const read = () => { try { return localStorage.getItem("neuralmean-theme"); } catch { return null; } };
  const keep = (value) => { try { localStorage.setItem("neuralmean-theme", value); } catch { /* a page from a file may not keep anything */ } };
  const isDark = () => (root.dataset.theme || (dark.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    button.textContent = isDark() ? "Light" : "Dark";
  };
  const saved = read();
  if (saved === "dark" || saved === "light") root.dataset.theme = saved;
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    keep(root.dataset.theme);
    show();
  });
  dark.addEventListener("change", show);
  show();
})();
