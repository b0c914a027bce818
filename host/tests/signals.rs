//! Tests that a signal to the launcher ends the job. This is a separate test program, because the
//! signal goes to the whole process.

use std::time::{Duration, Instant};

use devcomm_host::{Error, LocalJob, WorldError};

/// Runs a job whose ranks ignore signals, and whose rank 0 signals the launcher once both ranks
/// have written their process ids.
fn interrupted(signal: &'static str) {
    let folder = tempfile::tempdir().unwrap();
    let launcher = std::process::id();
    let script = r#"trap '' TERM INT HUP
        echo $$ > "$OUT/$RANK.part"; mv "$OUT/$RANK.part" "$OUT/$RANK"
        if [ $RANK = 0 ]; then
            while [ ! -e "$OUT/1" ]; do sleep 0.01; done
            kill -$SIGNAL $LAUNCHER
        fi
        exec sleep 600"#;
    let start = Instant::now();
    let error = LocalJob::new(2)
        .unwrap()
        .program("/bin/sh")
        .args(["-c", script])
        .env("OUT", folder.path())
        .env("LAUNCHER", launcher.to_string())
        .env("SIGNAL", signal.trim_start_matches("SIG"))
        .run()
        .unwrap_err();
    assert!(
        matches!(error, Error::World(WorldError::Interrupted { signal: s }) if s == signal),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(60));
    for rank in ["0", "1"] {
        let id = std::fs::read_to_string(folder.path().join(rank)).unwrap();
        let process = std::path::Path::new("/proc").join(id.trim());
        assert!(!process.exists(), "rank {rank} is still there");
    }
}

#[test]
fn a_signal_to_the_launcher_ends_all_ranks_of_one_job_after_the_other() {
    ["SIGTERM", "SIGINT", "SIGHUP", "SIGTERM"].into_iter().for_each(interrupted);
}
