//! What a launcher such as torchrun says in the environment.

use std::ffi::OsString;
use std::time::Duration;

use crate::{Error, Result};

/// Reads an environment variable.
pub(crate) type Lookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// One process of several, as its launcher set it up.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Launched {
    pub rank: usize,
    pub n_ranks: usize,
    pub local_rank: usize,
    pub host: String,
    pub port: u16,
    pub job: String,
    pub timeout: Duration,
}

const DEFAULT_JOB: &str = "devcomm";
const LONGEST_JOB: usize = 1024;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// More ranks than any machine has, so that a mistyped WORLD_SIZE does not take all memory.
const MOST_RANKS: usize = 1 << 20;

/// What the launcher says, or `None` when there is none: neither RANK nor WORLD_SIZE is set.
///
/// # Errors
///
/// [`Error::Environment`] names a variable that is missing or makes no sense.
pub(crate) fn launched(var: Lookup<'_>) -> Result<Option<Launched>> {
    let (rank, n_ranks) = match (text(var, "RANK")?, text(var, "WORLD_SIZE")?) {
        (None, None) => return Ok(None),
        (Some(rank), Some(n_ranks)) => (rank, n_ranks),
        (None, Some(_)) => return Err(unset("RANK", "WORLD_SIZE is set")),
        (Some(_), None) => return Err(unset("WORLD_SIZE", "RANK is set")),
    };
    let n_ranks = number("WORLD_SIZE", n_ranks, 1, MOST_RANKS)?;
    let rank = number("RANK", rank, 0, n_ranks - 1)?;
    let alone = n_ranks == 1;
    let local_rank = match text(var, "LOCAL_RANK")? {
        Some(local_rank) => number("LOCAL_RANK", local_rank, 0, n_ranks - 1)?,
        None if alone => 0,
        None => return Err(unset("LOCAL_RANK", "RANK and WORLD_SIZE are set")),
    };
    let host = match text(var, "MASTER_ADDR")? {
        Some(host) => host,
        None if alone => "localhost".to_owned(),
        None => return Err(unset("MASTER_ADDR", "RANK and WORLD_SIZE are set")),
    };
    let port = if alone { 1 } else { port(var)? };
    let job = match text(var, "DEVCOMM_JOB_ID")? {
        Some(job) => job,
        None => text(var, "TORCHELASTIC_RUN_ID")?.unwrap_or_else(|| DEFAULT_JOB.to_owned()),
    };
    if job.len() > LONGEST_JOB {
        let why = format!("the job id has {} bytes, at most {LONGEST_JOB} are allowed", job.len());
        return Err(Error::Environment { variable: "DEVCOMM_JOB_ID", value: None, why });
    }
    let timeout = timeout(var)?;
    Ok(Some(Launched { rank, n_ranks, local_rank, host, port, job, timeout }))
}

/// The port of the rendezvous: DEVCOMM_PORT, else MASTER_PORT, which torchrun may hold itself.
fn port(var: Lookup<'_>) -> Result<u16> {
    let parse =
        |variable, value| number(variable, value, 1, usize::from(u16::MAX)).map(|port| port as u16);
    if let Some(port) = text(var, "DEVCOMM_PORT")? {
        return parse("DEVCOMM_PORT", port);
    }
    let Some(value) = text(var, "MASTER_PORT")? else {
        return Err(unset("MASTER_PORT", "RANK and WORLD_SIZE are set"));
    };
    let port = parse("MASTER_PORT", value.clone())?;
    let taken = text(var, "TORCHELASTIC_USE_AGENT_STORE")?;
    if !taken.is_some_and(|taken| taken.eq_ignore_ascii_case("true")) {
        return Ok(port);
    }
    port.checked_add(1).ok_or_else(|| Error::Environment {
        variable: "MASTER_PORT",
        value: Some(value),
        why: "torchrun holds this port and there is none after it; set DEVCOMM_PORT".to_owned(),
    })
}

/// How long ranks wait for each other to arrive.
pub(crate) fn timeout(var: Lookup<'_>) -> Result<Duration> {
    let Some(value) = text(var, "DEVCOMM_TIMEOUT")? else { return Ok(DEFAULT_TIMEOUT) };
    let parsed = value.trim().parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
    // A year is for ever, and does not overflow a deadline.
    match parsed.map(|seconds| Duration::try_from_secs_f64(seconds.min(3.2e7))) {
        Some(Ok(timeout)) => Ok(timeout),
        _ => Err(Error::Environment {
            variable: "DEVCOMM_TIMEOUT",
            value: Some(value),
            why: "not a number of seconds above 0".to_owned(),
        }),
    }
}

/// A variable's text; empty is unset.
fn text(var: Lookup<'_>, variable: &'static str) -> Result<Option<String>> {
    match var(variable).filter(|value| !value.is_empty()).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err(value)) => Err(Error::Environment {
            variable,
            value: Some(value.to_string_lossy().into_owned()),
            why: "not UTF-8".to_owned(),
        }),
    }
}

fn number(variable: &'static str, value: String, least: usize, most: usize) -> Result<usize> {
    match value.trim().parse() {
        Ok(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(Error::Environment {
            variable,
            value: Some(value),
            why: format!("not a number from {least} to {most}"),
        }),
    }
}

fn unset(variable: &'static str, although: &str) -> Error {
    let why = format!(
        "not set although {although}; a launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT together"
    );
    Error::Environment { variable, value: None, why }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "5"),
        ("WORLD_SIZE", "8"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node0"),
        ("MASTER_PORT", "29500"),
    ];

    fn with(extra: &[(&str, &str)]) -> Result<Option<Launched>> {
        launched(&|name| {
            let all = extra.iter().chain(&TORCHRUN);
            all.clone().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        })
    }

    fn good(extra: &[(&str, &str)]) -> Launched {
        with(extra).unwrap().unwrap()
    }

    #[test]
    fn without_a_launcher_there_is_nothing() {
        assert_eq!(launched(&|_| None).unwrap(), None);
    }

    #[test]
    fn torchruns_variables_make_one_rank() {
        let expected = Launched {
            rank: 5,
            n_ranks: 8,
            local_rank: 1,
            host: "node0".into(),
            port: 29500,
            job: "devcomm".into(),
            timeout: Duration::from_secs(60),
        };
        assert_eq!(good(&[]), expected);
        assert_eq!(good(&[("TORCHELASTIC_RUN_ID", "abc")]).job, "abc");
        assert_eq!(good(&[("TORCHELASTIC_RUN_ID", "abc"), ("DEVCOMM_JOB_ID", "x")]).job, "x");
        assert_eq!(good(&[("DEVCOMM_TIMEOUT", "2.5")]).timeout, Duration::from_millis(2500));
    }

    #[test]
    fn the_port_is_the_next_one_when_torchrun_holds_the_masters() {
        assert_eq!(good(&[("TORCHELASTIC_USE_AGENT_STORE", "True")]).port, 29501);
        assert_eq!(good(&[("TORCHELASTIC_USE_AGENT_STORE", "False")]).port, 29500);
        let both = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("DEVCOMM_PORT", "7000")];
        assert_eq!(good(&both).port, 7000);
        let last = [("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_PORT", "65535")];
        assert!(with(&last).unwrap_err().to_string().contains("DEVCOMM_PORT"));
    }

    #[test]
    fn a_rank_alone_needs_no_address() {
        let alone = launched(&|name| {
            [("RANK", "0"), ("WORLD_SIZE", "1")]
                .into_iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.into())
        });
        let alone = alone.unwrap().unwrap();
        assert_eq!((alone.rank, alone.n_ranks, alone.local_rank), (0, 1, 0));
    }

    #[test]
    fn a_variable_that_is_missing_or_hostile_is_named() {
        let bad: [(&str, &str); 17] = [
            ("RANK", ""),
            ("RANK", "8"),
            ("RANK", "-1"),
            ("RANK", "one"),
            ("RANK", "99999999999999999999999"),
            ("WORLD_SIZE", ""),
            ("WORLD_SIZE", "0"),
            ("WORLD_SIZE", "18446744073709551615"),
            ("LOCAL_RANK", ""),
            ("LOCAL_RANK", "9"),
            ("MASTER_ADDR", ""),
            ("MASTER_PORT", ""),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "65536"),
            ("DEVCOMM_TIMEOUT", "0"),
            ("DEVCOMM_TIMEOUT", "NaN"),
            ("DEVCOMM_TIMEOUT", "soon"),
        ];
        for (variable, value) in bad {
            let error = with(&[(variable, value)]).unwrap_err().to_string();
            assert!(error.starts_with(variable), "{variable}={value}: {error}");
        }
        let long = "x".repeat(LONGEST_JOB + 1);
        assert!(with(&[("DEVCOMM_JOB_ID", &long)]).is_err());
        assert!(good(&[("DEVCOMM_TIMEOUT", "inf")]).timeout > Duration::from_secs(1 << 20));
    }

    #[test]
    fn a_value_that_is_not_text_is_an_error() {
        let error = launched(&|name| (name == "RANK").then(|| OsString::from_vec(vec![0xff])));
        assert!(error.unwrap_err().to_string().contains("not UTF-8"));
    }
}
