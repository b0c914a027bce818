//! Tests of `LocalJob`: it starts ranks as processes of this host, and ends all when one fails.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use devcomm_host::{Error, LocalJob, WorldError};

/// Returns a job whose ranks run a shell script.
fn shell(n_ranks: usize, script: &str) -> LocalJob {
    LocalJob::new(n_ranks).unwrap().program("/bin/sh").args(["-c", script])
}

#[test]
fn every_rank_gets_torchruns_variables_and_all_meet_at_one_port() {
    let folder = tempfile::tempdir().unwrap();
    shell(
        3,
        r#"echo "$WORLD_SIZE $LOCAL_WORLD_SIZE $LOCAL_RANK" \
            "$MASTER_ADDR $MASTER_PORT $DEVCOMM_JOB_ID $EXTRA" > "$OUT/$RANK""#,
    )
    .env("OUT", folder.path())
    .env("EXTRA", "more")
    .run()
    .unwrap();
    let variables: Vec<Vec<String>> = (0..3)
        .map(|rank| std::fs::read_to_string(folder.path().join(rank.to_string())).unwrap())
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .collect();
    for (rank, variables) in variables.iter().enumerate() {
        assert_eq!(variables[..4], ["3", "3", &rank.to_string(), "127.0.0.1"]);
        assert_ne!(variables[4].parse::<u16>().unwrap(), 0);
        assert_eq!(variables[6], "more");
    }
    assert!(variables.iter().all(|rank| rank[4..6] == variables[0][4..6]), "{variables:?}");
}

#[test]
fn the_rank_that_fails_is_named_with_its_exit_code() {
    let error = shell(3, "[ $RANK = 1 ] && exit 7; exit 0").run().unwrap_err();
    assert_eq!(error.to_string(), "rank 1 failed: its process ended with exit code 7");
}

#[test]
fn a_rank_killed_by_a_signal_is_named_before_those_that_failed_because_of_it() {
    let error = shell(3, "[ $RANK = 2 ] && kill -9 $$; sleep 0.2; exit 1").run().unwrap_err();
    assert_eq!(error.to_string(), "rank 2 failed: its process ended with signal 9 (SIGKILL)");
}

#[test]
fn the_others_are_ended_when_one_fails() {
    let start = Instant::now();
    let error = shell(4, "[ $RANK = 3 ] && exit 1; exec sleep 600").run().unwrap_err();
    assert!(matches!(error, Error::World(WorldError::RankFailed { rank: 3, .. })), "{error}");
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn the_others_are_asked_for_their_last_operations_before_they_are_ended() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"trap 'echo asked > "$OUT/$RANK"' USR1
        [ $RANK = 1 ] && exit 1
        while :; do sleep 0.05; done"#;
    shell(3, script).env("OUT", folder.path()).run().unwrap_err();
    for rank in ["0", "2"] {
        assert_eq!(std::fs::read_to_string(folder.path().join(rank)).unwrap(), "asked\n");
    }
}

#[test]
fn the_other_ranks_go_on_if_the_job_survives() {
    let start = Instant::now();
    let job = |script| shell(3, script).survive().run();
    job("[ $RANK = 1 ] && exit 7; exec sleep 5").unwrap();
    assert!(start.elapsed() >= Duration::from_secs(5));
    let error = job("[ $RANK = 1 ] || sleep 0.5; exit $((7 + RANK))").unwrap_err();
    assert_eq!(error.to_string(), "rank 1 failed: its process ended with exit code 8");
}

#[test]
fn every_job_has_an_id_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"echo "$DEVCOMM_JOB_ID" >> "$OUT/ids""#;
    for _ in 0..3 {
        shell(2, script).env("OUT", folder.path()).run().unwrap();
    }
    let ids = std::fs::read_to_string(folder.path().join("ids")).unwrap();
    let mut ids: Vec<&str> = ids.lines().collect();
    assert_eq!(ids.len(), 6);
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3, "{ids:?}");
}

#[test]
fn every_job_has_a_random_token_of_256_bits_that_its_ranks_share() {
    let folder = tempfile::tempdir().unwrap();
    let script = r#"echo "$DEVCOMM_JOB_TOKEN" >> "$OUT/tokens""#;
    for _ in 0..3 {
        shell(2, script).env("OUT", folder.path()).run().unwrap();
    }
    let tokens = std::fs::read_to_string(folder.path().join("tokens")).unwrap();
    let tokens: Vec<&str> = tokens.lines().collect();
    let is_hex = |token: &&str| token.len() == 64 && token.bytes().all(|c| c.is_ascii_hexdigit());
    assert!(tokens.len() == 6 && tokens.iter().all(is_hex), "{tokens:?}");
    let distinct: HashSet<&&str> = tokens.iter().collect();
    assert!(distinct.len() == 3 && tokens.chunks(2).all(|job| job[0] == job[1]), "{tokens:?}");
}

#[test]
fn a_program_that_cannot_be_started_is_an_error() {
    let error = LocalJob::new(2).unwrap().program("/nonexistent/program").run().unwrap_err();
    assert!(matches!(error, Error::World(WorldError::SpawnFailed { rank: 0, .. })), "{error}");
    assert!(LocalJob::new(0).is_err());
}
