//! The backstop for what tch reports by panicking.

use anyhow::{Result, anyhow};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook};
use std::sync::Mutex;

static LAST_PANIC: Mutex<Option<String>> = Mutex::new(None);

/// Runs `body` and turns a panic into an error. tch's layers and optimisers have no fallible calls: out of
/// memory on a GPU, for one, reaches us only as a panic, and its user is owed a message, not a backtrace.
pub fn without_panics(body: impl FnOnce() -> Result<()>) -> Result<()> {
    set_hook(Box::new(remember));
    // Nothing that the panic may have left half-changed is looked at again: the program ends.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| Err(anyhow!(message())))
}

fn remember(panic: &PanicHookInfo<'_>) {
    let text = panic.payload_as_str().unwrap_or("no message").to_string();
    if let Ok(mut last) = LAST_PANIC.lock() {
        *last = Some(text);
    }
}

fn message() -> String {
    let text = LAST_PANIC.lock().ok().and_then(|mut last| last.take()).unwrap_or_default();
    let way_out = if text.contains("out of memory") || text.contains("can't allocate") {
        "lower --hidden, --batch or --seq-len, or give --device cpu"
    } else {
        "this should not happen: please report it with the command line"
    };
    format!("libtorch failed: {}; {way_out}", first_line(&text))
}

/// libtorch appends its own C++ backtrace after the first line.
fn first_line(text: &str) -> String {
    let text = text.replace("\\n", "\n");
    text.lines().next().unwrap_or("no message").trim().to_string()
}
