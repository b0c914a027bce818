//! The plugin's settings, from environment variables.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::error::{Error, Result};

/// How data is copied from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyMethod {
    /// [`CopyMethod::Mapped`] where the target's device can access the memory, else as
    /// [`CopyMethod::Peer`].
    Auto,
    /// `cuMemcpyPeerAsync`: direct, whether or not the memory is mapped for the other device.
    Peer,
    /// `cuMemcpyDtoDAsync`: direct; an error where the target's device cannot access the memory.
    Mapped,
    /// Copies through pinned host memory, for devices without peer access.
    Staged,
}

/// How the plugin adds to a signal in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalMethod {
    /// Additions by the device where supported (CUDA 13.1), else [`SignalMethod::Write`].
    Auto,
    /// Writes of the sum. The old value is the plugin's own copy, or is read from the device.
    Write,
}

/// Valid numbers of slots.
pub(crate) const SLOTS: RangeInclusive<u64> = 2..=1024;
/// Valid slot sizes, in KiB.
pub(crate) const SLOT_KIB: RangeInclusive<u64> = 4..=65536;

/// The plugin's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// `DEVCOMM_GIN_COPY`: `auto`, `peer`, `mapped` or `staged`.
    pub copy: CopyMethod,
    /// `DEVCOMM_GIN_SIGNAL`: `auto` or `write`.
    pub signal: SignalMethod,
    /// `DEVCOMM_GIN_SLOTS`: staging slots of each rank, and of each direction between two
    /// processes.
    pub slots: usize,
    /// `DEVCOMM_GIN_SLOT_KIB`, here in bytes: the size of a slot.
    pub slot_bytes: usize,
    /// `DEVCOMM_GIN_DEPTH`: maximum operations in one rank's stream; more wait in the plugin.
    pub depth: u64,
    /// `DEVCOMM_GIN_CONNECTIONS`: network devices to report, at most 4, one connection for each.
    pub connections: i32,
    /// `DEVCOMM_GIN_TIMEOUT`, in seconds: the time that a rank waits for the others to connect.
    pub timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            copy: CopyMethod::Auto,
            signal: SignalMethod::Auto,
            slots: 16,
            slot_bytes: 512 << 10,
            depth: 256,
            connections: 1,
            timeout: Duration::from_secs(60),
        }
    }
}

impl Config {
    /// Reads the environment.
    ///
    /// # Errors
    ///
    /// [`Error::Variable`].
    pub fn from_env() -> Result<Self> {
        Self::read(|name| std::env::var(name).ok())
    }

    fn read(variable: impl Fn(&'static str) -> Option<String>) -> Result<Self> {
        let text = |name| variable(name).filter(|value| !value.is_empty());
        let default = Self::default();
        let copy = match text("DEVCOMM_GIN_COPY").as_deref() {
            None | Some("auto") => CopyMethod::Auto,
            Some("peer") => CopyMethod::Peer,
            Some("mapped") => CopyMethod::Mapped,
            Some("staged") => CopyMethod::Staged,
            Some(value) => {
                return Err(invalid(
                    "DEVCOMM_GIN_COPY",
                    value,
                    "one of auto, peer, mapped and staged",
                ));
            }
        };
        let signal = match text("DEVCOMM_GIN_SIGNAL").as_deref() {
            None | Some("auto") => SignalMethod::Auto,
            Some("write") => SignalMethod::Write,
            Some(value) => {
                return Err(invalid("DEVCOMM_GIN_SIGNAL", value, "one of auto and write"));
            }
        };
        let number = |name, default: u64, range: RangeInclusive<u64>, expected| match text(name) {
            None => Ok(default),
            Some(value) => match value.parse::<u64>() {
                Ok(number) if range.contains(&number) => Ok(number),
                _ => Err(invalid(name, &value, expected)),
            },
        };
        let kib = default.slot_bytes as u64 >> 10;
        Ok(Self {
            copy,
            signal,
            slots: number("DEVCOMM_GIN_SLOTS", default.slots as u64, SLOTS, "2 to 1024")? as usize,
            slot_bytes: (number("DEVCOMM_GIN_SLOT_KIB", kib, SLOT_KIB, "4 to 65536")? as usize)
                << 10,
            depth: number("DEVCOMM_GIN_DEPTH", default.depth, 1..=1024, "1 to 1024")?,
            connections: number("DEVCOMM_GIN_CONNECTIONS", 1, 1..=4, "1 to 4")? as i32,
            timeout: Duration::from_secs(number(
                "DEVCOMM_GIN_TIMEOUT",
                default.timeout.as_secs(),
                1..=86400,
                "1 to 86400 seconds",
            )?),
        })
    }
}

fn invalid(variable: &'static str, value: &str, expected: &'static str) -> Error {
    Error::Variable { variable, value: value.to_owned(), expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, value: &str) -> Result<Config> {
        Config::read(|variable| (variable == name).then(|| value.to_owned()))
    }

    #[test]
    fn nothing_set_is_the_default_and_empty_is_not_set() {
        assert_eq!(Config::read(|_| None), Ok(Config::default()));
        assert_eq!(Config::read(|_| Some(String::new())), Ok(Config::default()));
    }

    #[test]
    fn values_are_read_and_an_error_names_the_variable_and_its_value() {
        assert_eq!(with("DEVCOMM_GIN_COPY", "staged").unwrap().copy, CopyMethod::Staged);
        assert_eq!(with("DEVCOMM_GIN_SIGNAL", "write").unwrap().signal, SignalMethod::Write);
        assert_eq!(with("DEVCOMM_GIN_SLOT_KIB", "64").unwrap().slot_bytes, 65536);
        assert_eq!(with("DEVCOMM_GIN_DEPTH", "1").unwrap().depth, 1);
        assert_eq!(with("DEVCOMM_GIN_TIMEOUT", "7").unwrap().timeout, Duration::from_secs(7));
        for (name, value) in
            [("DEVCOMM_GIN_COPY", "fast"), ("DEVCOMM_GIN_SLOTS", "1"), ("DEVCOMM_GIN_TIMEOUT", "-")]
        {
            let error = with(name, value).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name}={value}: ")), "{error}");
        }
    }
}
