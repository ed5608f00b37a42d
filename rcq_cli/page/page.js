"use strict";
(function () {
  var root = document.documentElement;
  root.classList.add("js");

  var theme = document.getElementById("theme");
  theme.addEventListener("click", function () {
    var dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  var buttons = Array.from(document.querySelectorAll("button[data-show]"));
  function show(axis) {
    document.querySelectorAll("[data-axis]").forEach(function (chart) { chart.hidden = chart.dataset.axis !== axis; });
    buttons.forEach(function (button) { button.setAttribute("aria-pressed", String(button.dataset.show === axis)); });
  }
  buttons.forEach(function (button) { button.addEventListener("click", function () { show(button.dataset.show); }); });
  if (buttons.length) { show(buttons[0].dataset.show); }

  document.querySelectorAll("table").forEach(function (table) {
    Array.from(table.querySelectorAll("th")).forEach(function (head, column) {
      head.dataset.sort = "";
      head.tabIndex = 0;
      head.setAttribute("role", "button");
      var up = false;
      function sort() {
        var body = table.tBodies[0], rows = Array.from(body.rows);
        up = !up;
        rows.sort(function (a, b) {
          var x = a.cells[column].textContent, y = b.cells[column].textContent;
          var order = x.localeCompare(y, "en", { numeric: true });
          return up ? order : -order;
        });
        rows.forEach(function (row) { body.appendChild(row); });
      }
      head.addEventListener("click", sort);
      head.addEventListener("keydown", function (event) { if (event.key === "Enter") { sort(); } });
    });
  });
})();
