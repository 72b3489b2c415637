// Package browser has tests of the dashboard in a real browser. They need the tag browser and chromium: make browser.
package browser
