//! Logs to standard error.

use std::fmt::Arguments;
use std::io::{Write, stderr};
use std::sync::LazyLock;

/// Logs an error. A closed standard error is ignored.
pub(crate) fn error(message: impl std::fmt::Display) {
    line(format_args!("error: {message}"));
}

/// Logs a message if `DEVCOMM_GIN_DEBUG` is set and not 0.
pub(crate) fn debug(message: Arguments<'_>) {
    static ON: LazyLock<bool> = LazyLock::new(|| {
        std::env::var_os("DEVCOMM_GIN_DEBUG").is_some_and(|value| !value.is_empty() && value != "0")
    });
    if *ON {
        line(message);
    }
}

fn line(message: Arguments<'_>) {
    // One write per line, so that lines of several ranks do not mix.
    let text = format!("devcomm-gin [{}] {message}\n", std::process::id());
    let _ = stderr().write_all(text.as_bytes());
}
