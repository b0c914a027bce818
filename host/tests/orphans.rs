//! Tests that ranks die with a launcher that is killed by SIGKILL.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use devcomm_host::LocalJob;

const FOLDER: &str = "DEVCOMM_TEST_FOLDER";
const RANKS: usize = 4;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Calls `poll` until it returns a value.
fn eventually<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(start.elapsed() < TIMEOUT, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Returns whether a process exists and is not a zombie (in a container there may be no reaper).
fn is_alive(id: &str) -> bool {
    let status = std::fs::read_to_string(Path::new("/proc").join(id).join("stat"));
    // The state, Z for a zombie, follows the program's name, which is in parentheses.
    status.is_ok_and(|status| !status.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

#[test]
fn ranks_die_with_a_launcher_that_is_killed() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        // The ranks ignore the signals by which a launcher ends them.
        let script = r#"trap '' TERM INT HUP
            echo $$ > "$OUT/$RANK.part"; mv "$OUT/$RANK.part" "$OUT/$RANK"; exec sleep 600"#;
        let job = LocalJob::new(RANKS).unwrap().program("/bin/sh").args(["-c", script]);
        return job.env("OUT", folder).run().unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ranks_die_with_a_launcher_that_is_killed", "--nocapture"])
        .env(FOLDER, folder.path())
        .spawn()
        .unwrap();
    let started = |rank: usize| {
        eventually("a rank does not start", || {
            std::fs::read_to_string(folder.path().join(rank.to_string())).ok()
        })
    };
    let ids: Vec<String> = (0..RANKS).map(|rank| started(rank).trim().to_owned()).collect();
    assert!(ids.iter().all(|id| is_alive(id)), "{ids:?}");
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    eventually("ranks outlive their launcher", || {
        (!ids.iter().any(|id| is_alive(id))).then_some(())
    });
}
