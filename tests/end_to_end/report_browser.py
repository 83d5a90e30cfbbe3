"""A report of Snakemake, opened and clicked through in headless Chromium."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1500,1000",
)
# What a page may ask for without leaving the machine.
INSIDE = ("file:", "data:", "blob:", "about:", "chrome:")


def missing() -> str:
    """Say which program is missing, empty if none is."""
    if not any(shutil.which(name) for name in BROWSERS):
        return "Chromium is not installed"
    return "" if shutil.which("chromedriver") else "chromedriver is not installed"


class ReportBrowser:
    """A browser on one page; `profile` is an empty folder for its settings."""

    def __init__(self, page: Path, profile: Path):
        options = webdriver.ChromeOptions()
        options.binary_location = next(filter(None, map(shutil.which, BROWSERS)))
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self._messages: list[dict] = []
        self._console: list[dict] = []
        self.driver.get(page.absolute().as_uri())

    def __enter__(self) -> ReportBrowser:
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.quit()

    def wait(self, condition, seconds: float = 20):
        """Return the first true value of ``condition(driver)``; an error of Selenium after some seconds."""
        return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(condition)

    def find(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def menu(self) -> None:
        """Go back to the menu, as the breadcrumbs do, whose form differs from view to view."""
        self.driver.execute_script("app.setView({navbarMode: 'menu'})")
        self.wait(lambda _: "GENERAL" in self.driver.find_element(By.ID, "app").text)

    def open_category(self, name: str) -> list[str]:
        """Open a category from the menu and return the labels of its rows."""
        self.menu()
        self.driver.find_element(By.XPATH, f"//li//*[normalize-space(text())='{name}']").click()
        self.wait(lambda _: self.find("tbody tr"))
        return [row.text.strip() for row in self.find("tbody tr")]

    def show(self, label: str) -> None:
        """Click the eye of a row."""
        self._click(label, "eye")

    def caption(self, label: str, category: str) -> str:
        """Click the i of a row, return the caption beside it, and come back to the category."""
        self._click(label, "information-circle")
        (shown,) = self.wait(lambda _: self.find("li.prose"))
        text = shown.text
        self.open_category(category)
        return text

    def _click(self, label: str, icon: str) -> None:
        (row,) = [row for row in self.find("tbody tr") if row.text.strip() == label]
        row.find_element(By.CSS_SELECTOR, f"a[iconname='{icon}']").click()

    def shown_image(self, name: str) -> tuple[int, int, str]:
        """Width and height in pixels and address of the image in the page, once the one of this name is loaded."""
        script = (
            "let i = document.querySelector('#app .p-3 > img');"
            f"return i && i.complete && i.naturalWidth && i.src.includes('{name}')"
            " ? [i.naturalWidth, i.naturalHeight, i.src] : null"
        )
        return tuple(self.wait(lambda driver: driver.execute_script(script)))

    def in_frame(self, script: str):
        """Run a script in the page shown inside the report until it gives something true, and return that."""

        def attempt(driver):
            # The frame is replaced when another result is shown, and is empty at first.
            try:
                driver.switch_to.frame(self.find("#app iframe")[0])
                return driver.execute_script(script)
            except (IndexError, WebDriverException):
                return None
            finally:
                driver.switch_to.default_content()

        return self.wait(attempt)

    def errors(self) -> list[str]:
        """Messages of the console that are errors."""
        self._console += self.driver.get_log("browser")
        return [entry["message"] for entry in self._console if entry["level"] == "SEVERE"]

    def outside(self) -> list[str]:
        """Addresses that were asked for and do not lie on this machine's disk."""
        entries = self.driver.get_log("performance")
        self._messages += [json.loads(entry["message"])["message"] for entry in entries]
        urls = [
            message["params"].get("request", message["params"]).get("url", "")
            for message in self._messages
            if message["method"] in ("Network.requestWillBeSent", "Network.webSocketCreated")
        ]
        return [url for url in urls if not url.startswith(INSIDE)]
