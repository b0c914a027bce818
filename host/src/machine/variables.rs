//! Parsing environment variables, with errors that name the variable.

use std::ffi::OsString;
use std::time::Duration;

use crate::error::{Error, Result, WorldError};

/// How long a call may wait for the other ranks, by default.
const DEFAULT_DEADLINE: Duration = Duration::from_secs(600);

/// Reads an environment variable.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// Returns a variable's text; an empty value counts as unset.
pub(crate) fn text(var: Lookup<'_>, variable: &'static str) -> Result<Option<String>> {
    match var(variable).filter(|value| !value.is_empty()).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err(value)) => Err(WorldError::Environment {
            variable,
            value: Some(value.to_string_lossy().into_owned()),
            why: "not UTF-8".to_owned(),
        }
        .into()),
    }
}

/// Returns the first of several variables that is set, and its text.
pub(crate) fn first(
    var: Lookup<'_>,
    variables: &[&'static str],
) -> Result<Option<(&'static str, String)>> {
    for &variable in variables {
        if let Some(text) = text(var, variable)? {
            return Ok(Some((variable, text)));
        }
    }
    Ok(None)
}

/// Parses `value`, the text of `variable`: a number from `least` to `most`.
pub(crate) fn number(
    variable: &'static str,
    value: String,
    least: usize,
    most: usize,
) -> Result<usize> {
    match value.trim().parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(WorldError::Environment {
            variable,
            value: Some(value),
            why: format!("not a number from {least} to {most}"),
        }
        .into()),
    }
}

/// Returns a port, if this variable is set.
pub(crate) fn port(var: Lookup<'_>, variable: &'static str) -> Result<Option<u16>> {
    let Some(value) = text(var, variable)? else { return Ok(None) };
    // The cast loses nothing: `number` checks the limit.
    number(variable, value, 1, usize::from(u16::MAX)).map(|port| Some(port as u16))
}

/// Returns the error of a missing variable that its launcher always sets.
pub(crate) fn unset(variable: &'static str, although: &str, launcher: &str) -> Error {
    let why = format!("not set although {although} is; {launcher}");
    Error::World(WorldError::Environment { variable, value: None, why })
}

/// Returns a number of seconds. `zero` says, here and in the error, which are valid: "above 0", or
/// also 0 ("or 0").
pub(crate) fn seconds(
    var: Lookup<'_>,
    variable: &'static str,
    zero: &str,
) -> Result<Option<Duration>> {
    let Some(value) = text(var, variable)? else { return Ok(None) };
    // Less than a nanosecond would count as 0, which means that there is no limit.
    let is_valid = |seconds: &f64| *seconds >= 1e-9 || (*seconds == 0.0 && zero == "or 0");
    let parsed = value.trim().parse::<f64>().ok().filter(is_valid);
    // At most a year, so that deadlines do not overflow.
    match parsed.map(|seconds| Duration::try_from_secs_f64(seconds.min(3.2e7))) {
        Some(Ok(seconds)) => Ok(Some(seconds)),
        _ => {
            let (value, why) = (Some(value), format!("not a number of seconds {zero}"));
            Err(WorldError::Environment { variable, value, why }.into())
        }
    }
}

/// Returns whether a variable is 1; false if it is 0 or unset.
pub(crate) fn switch(var: Lookup<'_>, variable: &'static str) -> Result<bool> {
    match text(var, variable)?.as_deref() {
        None | Some("0") => Ok(false),
        Some("1") => Ok(true),
        Some(value) => {
            let (value, why) = (Some(value.to_owned()), "neither 0 nor 1".to_owned());
            Err(WorldError::Environment { variable, value, why }.into())
        }
    }
}

/// Fails for a value that makes no sense, also of a variable that this program would use only on
/// other machines or with a launcher.
pub(crate) fn check(var: Lookup<'_>) -> Result<()> {
    deadline(var)?;
    timeout(var)?;
    port(var, "DEVCOMM_PORT")?;
    switch(var, JIT).map(drop)
}

/// Whether the driver compiles kernels of which the program has the machine code.
pub(crate) const JIT: &str = "DEVCOMM_JIT";

/// Returns how long ranks that join wait for each other, if it is set.
pub(crate) fn timeout(var: Lookup<'_>) -> Result<Option<Duration>> {
    seconds(var, "DEVCOMM_TIMEOUT", "above 0")
}

/// Returns how long a call on GPUs may wait for the other ranks; `None` means forever.
pub(crate) fn deadline(var: Lookup<'_>) -> Result<Option<Duration>> {
    let deadline = seconds(var, "DEVCOMM_OPERATION_TIMEOUT", "or 0")?.unwrap_or(DEFAULT_DEADLINE);
    Ok(Some(deadline).filter(|deadline| !deadline.is_zero()))
}
