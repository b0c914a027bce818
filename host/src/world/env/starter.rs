//! The process that started the ranks of a job on this host. It identifies a job whose launcher
//! gives it no id, or no unique one.

use std::path::Path;

/// The launchers' processes that start ranks. A launcher that is itself started by a rank of
/// another job has that rank's variables, and is known by its name alone. Linux cuts names after 15
/// bytes.
const NAMES: [&str; 13] = [
    "hydra_pmi_proxy",
    "hydra_bstrap_pr",
    "pmi_proxy",
    "mpispawn",
    "mpiexec",
    "mpiexec.hydra",
    "mpiexec.gforker",
    "mpirun",
    "orterun",
    "orted",
    "prterun",
    "prte",
    "prted",
];

/// Returns the ancestor of this process that started the rank, as its number and the time when it
/// started, which no other process of this host has. `None` if it cannot be seen, as from a
/// container with its own numbers of processes.
///
/// Between it and this process there may be others, such as a shell that wraps the rank: these have
/// the rank's `variable` with this `value`.
pub(super) fn starter(variable: &str, value: &str) -> Option<String> {
    starter_in(Path::new("/proc"), "self", &format!("{variable}={value}"))
}

fn starter_in(processes: &Path, of: &str, variable: &str) -> Option<String> {
    let mut process = Process::read(processes, of)?;
    while process.parent != "0" {
        let number = process.parent;
        process = Process::read(processes, &number)?;
        // The environment of another user's process, or of a privileged one, cannot be read: such a
        // process is a wrapper, or a launcher that is known by its name.
        let environment = std::fs::read(processes.join(&number).join("environ"));
        let is_wrapper = environment.as_ref().is_ok_and(|environment| {
            environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
        });
        if NAMES.contains(&process.name.as_str()) || (environment.is_ok() && !is_wrapper) {
            return Some(format!("{number}@{}", process.since));
        }
    }
    None
}

/// A process, by its line in `/proc`.
struct Process {
    name: String,
    /// The number of its parent; 0 for the first process.
    parent: String,
    /// When it started, in ticks since the host did.
    since: String,
}

impl Process {
    fn read(processes: &Path, number: &str) -> Option<Self> {
        let line = std::fs::read_to_string(processes.join(number).join("stat")).ok()?;
        // The name is in parentheses, and may have some itself.
        let (name, rest) = line.rsplit_once(')')?;
        let (_, name) = name.split_once('(')?;
        // Fields 3 and following of `man proc_pid_stat`: 4 is the parent, 22 the time of the start.
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let field = |index: usize| fields.get(index).map(|field| (*field).to_owned());
        Some(Self { name: name.to_owned(), parent: field(1)?, since: field(19)? })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Returns a folder such as /proc, of processes with number, parent, name and environment.
    fn processes(list: &[(&str, &str, &str, Option<&str>)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (number, parent, name, environment) in list {
            let process = folder.path().join(number);
            fs::create_dir(&process).unwrap();
            let between = "1 ".repeat(17);
            let line = format!("{number} ({name}) S {parent} {between}7{number} 1 1");
            fs::write(process.join("stat"), line).unwrap();
            if let Some(environment) = environment {
                fs::write(process.join("environ"), environment.replace(' ', "\0")).unwrap();
            }
        }
        folder
    }

    fn found(list: &[(&str, &str, &str, Option<&str>)]) -> Option<String> {
        starter_in(processes(list).path(), "9", "PMI_RANK=1")
    }

    #[test]
    fn the_launcher_is_found_above_the_wrappers_of_a_rank() {
        let rank = Some("A=b PMI_RANK=1 PMI_SIZE=2");
        let above = [("1", "0", "init", None), ("4", "1", "launcher", Some("A=b PMI_RANK=11"))];
        let with = |list: &[_]| found(&[&above, list].concat());
        let direct = [("9", "4", "rank", rank)];
        assert_eq!(with(&direct).unwrap(), "4@74");
        let wrapped = [("9", "8", "rank", rank), ("8", "4", "a (b) c", rank)];
        assert_eq!(with(&wrapped).unwrap(), "4@74");
        // The wrapper may be a container's runtime, whose environment other users cannot read.
        let contained = [("9", "8", "rank", rank), ("8", "4", "starter", None)];
        assert_eq!(with(&contained).unwrap(), "4@74");
        // A launcher that a rank of another job, with the same number, has started.
        let proxy = ("7", "4", "hydra_pmi_proxy", rank);
        assert_eq!(with(&[("9", "7", "rank", rank), proxy]).unwrap(), "7@77");
    }

    #[test]
    fn a_launcher_that_cannot_be_seen_is_none() {
        let rank = Some("PMI_RANK=1");
        assert_eq!(found(&[("9", "1", "rank", rank), ("1", "0", "init", rank)]), None);
        assert_eq!(found(&[("9", "0", "rank", rank)]), None);
        assert_eq!(found(&[("9", "1", "rank", rank), ("1", "0", "init", None)]), None);
        assert_eq!(found(&[("9", "5", "rank", rank)]), None);
        assert_eq!(found(&[]), None);
    }
}
