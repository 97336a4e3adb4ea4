//! Turns tch's panics into error messages.

use anyhow::{Result, anyhow};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook};
use std::sync::Mutex;

static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Runs `body` and turns a panic into an error. A few calls of tch cannot return an error, so one
/// such as out of memory may reach this program as a panic. The user should see a message and not a
/// backtrace.
pub fn without_panics(body: impl FnOnce() -> Result<()>) -> Result<()> {
    set_hook(Box::new(remember));
    // The panic may have left values half-changed, but the program ends without using them again.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| Err(anyhow!(said()))).map_err(explained)
}

fn remember(panic: &PanicHookInfo<'_>) {
    let payload = panic.payload();
    let literal = payload.downcast_ref::<&str>().map(|text| text.to_string());
    let text = literal.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default();
    if let Ok(mut last) = LAST_PANIC.lock() {
        *last = Some(text);
    }
}

fn said() -> String {
    let text = LAST_PANIC.lock().ok().and_then(|mut last| last.take()).unwrap_or_default();
    format!("libtorch failed: {}", first_line(&text))
}

/// Adds the way out where it is known.
fn explained(error: anyhow::Error) -> anyhow::Error {
    let text = format!("{error:#}");
    if text.contains("out of memory") || text.contains("can't allocate") {
        let line = text.lines().next().unwrap_or_default();
        return anyhow!("{line}; lower --batch (and raise --accumulate), --context or --size");
    }
    error
}

/// The first line of libtorch's message, taken from the text of the failed `unwrap`. A C++
/// backtrace follows that line.
fn first_line(text: &str) -> &str {
    let said = text.split_once("Torch(\"").map_or(text, |(_, said)| said);
    let line = said.split("\\n").next().and_then(|line| line.lines().next()).unwrap_or_default();
    line.trim_end_matches("\")")
}
