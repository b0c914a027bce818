//! Errors of worlds: their environment variables, their rendezvous, their ranks.

use std::time::Duration;

use devcomm_locate::NotFound;

/// Errors of a world and its ranks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorldError {
    /// An environment variable of the launcher is missing or invalid.
    #[error("{variable}{}: {why}", shown(value))]
    Environment {
        /// The variable.
        variable: &'static str,
        /// The value, if set.
        value: Option<String>,
        /// What is wrong, and what to do.
        why: String,
    },
    /// Environment variables can no longer be set: other threads run, and may be reading the
    /// environment.
    #[error(
        "{} must be set before this process starts threads, but {}; build the world at the start \
         of main, or set the variables outside the program",
        variables.join(" "), how_many(*threads)
    )]
    EnvironmentInUse {
        /// Each as `NAME=value`.
        variables: Vec<String>,
        /// The number of threads of this process; `None` if they could not be counted.
        threads: Option<usize>,
    },
    /// devcomm's RMA plugin, which [`GinLoopback`](crate::GinLoopback) enables, was not found.
    #[error("{not_found}")]
    GinLoopbackNotFound {
        /// Where it was looked for.
        not_found: NotFound,
    },
    /// Some ranks did not connect to the rendezvous in time.
    #[error(
        "{} did not arrive at {address} within {:.0} s{}; check that every process was started \
         (DEVCOMM_TIMEOUT sets the time)",
        ranks(missing), waited.as_secs_f64(), details(notes)
    )]
    RanksMissing {
        /// The ranks that did not connect.
        missing: Vec<usize>,
        /// The address of rank 0's rendezvous.
        address: String,
        /// The time waited.
        waited: Duration,
        /// What else happened meanwhile: refused connections, the last error.
        notes: Vec<String>,
    },
    /// The rendezvous failed for another reason.
    #[error("rendezvous at {address}: {why}")]
    Rendezvous {
        /// The address of rank 0's rendezvous.
        address: String,
        /// What happened.
        why: String,
    },
    /// The ranks of a communicator make different calls. Nothing has been called.
    #[error("the ranks make different calls: {}", by_call(calls))]
    CallsDiffer {
        /// The call of each rank, by rank of the communicator.
        calls: Vec<String>,
    },
    /// A rank failed in a collective call, which therefore failed on all ranks: that rank returns
    /// its own error, and the others this one. The ranks' later calls match.
    #[error("rank {rank}{} failed in {call}: {why}", and_others(*others))]
    CallFailed {
        /// The call of the rank that failed.
        call: String,
        /// The first rank that failed, a rank of the communicator.
        rank: usize,
        /// The number of other ranks that failed too.
        others: usize,
        /// The error of that rank.
        why: String,
        /// Whether that error [is about the machine](crate::Error::is_hardware).
        is_hardware: bool,
    },
    /// The ranks give different options to a collective call, which therefore failed on all
    /// ranks.
    #[error(
        "{call}: {option} is {} on rank {} and {} on rank {}; pass the same on all ranks",
        first.1, first.0, second.1, second.0
    )]
    OptionsDiffer {
        /// The call.
        call: String,
        /// The option that differs.
        option: String,
        /// A rank of the communicator and its value.
        first: (usize, String),
        /// Another rank and its value.
        second: (usize, String),
    },
    /// Another rank died or is unreachable; the job cannot continue.
    #[error("rank {rank} is lost: {why}")]
    RankLost {
        /// The rank.
        rank: usize,
        /// The known details of the cause.
        why: String,
    },
    /// The function of a rank panicked.
    #[error("rank {rank} panicked: {message}")]
    RankPanicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A process started by [`World::spawn_local`](crate::World::spawn_local) failed.
    #[error("rank {rank} failed: its process ended with {how}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Exit code or signal.
        how: String,
    },
    /// A process could not be started.
    #[error("rank {rank} could not be started: {why}")]
    SpawnFailed {
        /// The rank.
        rank: usize,
        /// The system's reason.
        why: String,
    },
    /// The job was ended by a signal.
    #[error("the job was ended by {signal}")]
    Interrupted {
        /// The signal's name.
        signal: &'static str,
    },
}

fn shown(value: &Option<String>) -> String {
    value.as_ref().map_or_else(String::new, |value| format!("={value:?}"))
}

fn details(notes: &[String]) -> String {
    if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) }
}

fn and_others(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => " (and 1 other)".to_owned(),
        others => format!(" (and {others} others)"),
    }
}

/// Returns how many threads this process has.
fn how_many(threads: Option<usize>) -> String {
    match threads {
        Some(threads) => format!("it has {threads}"),
        None => "its threads could not be counted in /proc/self/task".to_owned(),
    }
}

/// Returns which ranks make which call.
fn by_call(calls: &[String]) -> String {
    let mut by_call: Vec<(&str, Vec<usize>)> = Vec::new();
    for (rank, call) in calls.iter().enumerate() {
        match by_call.iter_mut().find(|(known, _)| known == call) {
            Some((_, ranks)) => ranks.push(rank),
            None => by_call.push((call, vec![rank])),
        }
    }
    let line = |(call, callers): &(&str, Vec<usize>)| {
        let verb = if callers.len() == 1 { "calls" } else { "call" };
        format!("{} {verb} {call}", ranks(callers))
    };
    by_call.iter().map(line).collect::<Vec<_>>().join("; ")
}

/// Returns `rank 3`, or `ranks 1, 2, 5`; a long list is truncated.
pub(crate) fn ranks(list: &[usize]) -> String {
    const SHOWN: usize = 16;
    let mut text = list.iter().take(SHOWN).map(usize::to_string).collect::<Vec<_>>().join(", ");
    if list.len() > SHOWN {
        text.push_str(&format!(" and {} more", list.len() - SHOWN));
    }
    if list.len() == 1 { format!("rank {text}") } else { format!("ranks {text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_could_not_be_counted_have_no_number() {
        let text = |threads| {
            let variables = vec!["A=1".to_owned()];
            WorldError::EnvironmentInUse { variables, threads }.to_string()
        };
        assert!(text(Some(3)).contains("starts threads, but it has 3; build"), "{}", text(Some(3)));
        assert!(text(None).contains("but its threads could not be counted"), "{}", text(None));
    }

    #[test]
    fn missing_ranks_are_named_and_a_long_list_is_cut() {
        assert_eq!(ranks(&[3]), "rank 3");
        assert_eq!(ranks(&[1, 4]), "ranks 1, 4");
        assert!(ranks(&(0..40).collect::<Vec<_>>()).ends_with(", 15 and 24 more"));
    }
}
