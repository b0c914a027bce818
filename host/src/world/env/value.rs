//! Parsing environment variables, with errors that name the variable.

use std::ffi::OsString;

use crate::error::{Error, Result, WorldError};

/// Reads an environment variable.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// A variable's text; an empty value counts as unset.
pub(super) fn text(var: Lookup<'_>, variable: &'static str) -> Result<Option<String>> {
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

/// The first of several variables that is set, and its text.
pub(super) fn first(
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

pub(super) fn number(
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

/// A port, if this variable is set.
pub(super) fn port(var: Lookup<'_>, variable: &'static str) -> Result<Option<u16>> {
    let Some(value) = text(var, variable)? else { return Ok(None) };
    number(variable, value, 1, usize::from(u16::MAX)).map(|port| Some(port as u16))
}

/// The error of a missing variable that its launcher always sets.
pub(super) fn unset(variable: &'static str, although: &str, launcher: &str) -> Error {
    let why = format!("not set although {although} is; {launcher}");
    Error::World(WorldError::Environment { variable, value: None, why })
}
