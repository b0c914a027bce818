//! What the environment says.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::error::{Error, Result};

/// How data goes from one device to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copy {
    /// As [`Copy::Mapped`] where the target's device reaches the memory, else as [`Copy::Peer`].
    Auto,
    /// `cuMemcpyPeerAsync`: straight, whether or not the memory is mapped for the other device.
    Peer,
    /// `cuMemcpyDtoDAsync`: straight, and an error where the target's device does not reach the
    /// memory.
    Mapped,
    /// Through pinned host memory, where devices do not reach each other.
    Staged,
}

/// How a signal in device memory is added to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adding {
    /// By the device where it can (CUDA 13.1), else as [`Adding::Write`].
    Auto,
    /// A write of the sum that the plugin keeps, or of what it has read and added to.
    Write,
}

/// How many slots there can be.
pub(crate) const SLOTS: RangeInclusive<u64> = 2..=1024;
/// How large a slot can be, in KiB.
pub(crate) const SLOT_KIB: RangeInclusive<u64> = 4..=65536;

/// The plugin's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// `DEVCOMM_GIN_COPY`: `auto`, `peer`, `mapped` or `staged`.
    pub copy: Copy,
    /// `DEVCOMM_GIN_SIGNAL`: `auto` or `write`.
    pub adding: Adding,
    /// `DEVCOMM_GIN_SLOTS`: staging slots of each rank, and of each direction between two
    /// processes.
    pub slots: usize,
    /// `DEVCOMM_GIN_SLOT_KIB`, here in bytes: the size of a slot.
    pub slot_bytes: usize,
    /// `DEVCOMM_GIN_DEPTH`: operations that may be on one rank's stream at a time; more wait in the
    /// plugin.
    pub depth: u64,
    /// `DEVCOMM_GIN_CONNECTIONS`: devices to offer; NCCL makes a connection for each, at most 4.
    pub connections: i32,
    /// `DEVCOMM_GIN_TIMEOUT`, in seconds: how long a rank waits for the others to connect.
    pub timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            copy: Copy::Auto,
            adding: Adding::Auto,
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
            None | Some("auto") => Copy::Auto,
            Some("peer") => Copy::Peer,
            Some("mapped") => Copy::Mapped,
            Some("staged") => Copy::Staged,
            Some(value) => {
                return Err(refused(
                    "DEVCOMM_GIN_COPY",
                    value,
                    "one of auto, peer, mapped and staged",
                ));
            }
        };
        let adding = match text("DEVCOMM_GIN_SIGNAL").as_deref() {
            None | Some("auto") => Adding::Auto,
            Some("write") => Adding::Write,
            Some(value) => {
                return Err(refused("DEVCOMM_GIN_SIGNAL", value, "one of auto and write"));
            }
        };
        let number = |name, default: u64, range: RangeInclusive<u64>, expected| match text(name) {
            None => Ok(default),
            Some(value) => match value.parse::<u64>() {
                Ok(number) if range.contains(&number) => Ok(number),
                _ => Err(refused(name, &value, expected)),
            },
        };
        Ok(Self {
            copy,
            adding,
            slots: number("DEVCOMM_GIN_SLOTS", 16, SLOTS, "2 to 1024")? as usize,
            slot_bytes: (number("DEVCOMM_GIN_SLOT_KIB", 512, SLOT_KIB, "4 to 65536")? as usize)
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

fn refused(variable: &'static str, value: &str, expected: &'static str) -> Error {
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
    fn values_are_read_and_wrong_ones_named_with_what_they_can_be() {
        assert_eq!(with("DEVCOMM_GIN_COPY", "staged").unwrap().copy, Copy::Staged);
        assert_eq!(with("DEVCOMM_GIN_SIGNAL", "write").unwrap().adding, Adding::Write);
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
