//! Tests of launchers that give their jobs no id, with two jobs at a time on this host.

use std::ffi::OsString;
use std::io::Write;
use std::process::{Child, Command, Stdio};

use super::processes::{ROLE, as_rank};
use super::*;

/// The name of a rank's job, and how late the rank comes, in ms for each rank of both jobs.
const JOB: &str = "DEVCOMM_TEST_JOB";
const DELAYS: &str = "DEVCOMM_TEST_DELAYS";
const RANKS: usize = 3;

/// Joins late, and checks that the rank has joined its own job.
fn meet(config: &RendezvousConfig) {
    let job = std::env::var(JOB).unwrap();
    let delays = std::env::var(DELAYS).unwrap();
    let delay = delays.split(' ').nth(config.rank).unwrap().parse().unwrap();
    thread::sleep(Duration::from_millis(delay));
    let world = config.join().unwrap();
    assert_eq!(*world.all_gather(job.as_bytes()).unwrap(), vec![job.into_bytes(); RANKS]);
    world.finish().unwrap();
}

/// Starts a job whose ranks run this test.
fn start(mut launcher: Command, test: &str, job: &str, delays: &[u64]) -> Child {
    // This process may be one of a launcher or of a batch job.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        let of_launchers = ["PMI", "MPI_", "MPIR_", "OMPI_", "HYDRA_", "I_MPI_", "MV2_", "SLURM_"];
        if of_launchers.iter().any(|prefix| name.starts_with(prefix))
            || ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DEVCOMM_JOB_ID"]
                .contains(&&*name)
        {
            launcher.env_remove(&*name);
        }
    }
    let delays: Vec<String> = delays.iter().map(u64::to_string).collect();
    launcher.env(ROLE, test).env(JOB, job).env(DELAYS, delays.join(" "));
    launcher.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs two jobs at a time, whose ranks come in random order.
fn run_pairs(rounds: usize, test: &str, launcher: impl Fn() -> Command) {
    for round in 0..rounds {
        let mut random = fastrand::Rng::with_seed(round as u64);
        let jobs = ["A", "B"].map(|job| {
            let delays: Vec<u64> = (0..RANKS).map(|_| random.u64(..400)).collect();
            start(launcher(), test, job, &delays)
        });
        for job in jobs {
            let ended = job.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&ended.stderr);
            assert!(ended.status.success(), "round {round}: {said}");
        }
    }
}

/// Returns a command that runs this test in a shell, as the script of a rank would.
fn rank_command(test: &str) -> [String; 5] {
    let this = std::env::current_exe().unwrap().into_os_string().into_string().unwrap();
    let script = r#""$0" --exact "$1" >&2 || exit 1"#;
    ["/bin/sh", "-c", script, &this, test].map(String::from)
}

#[test]
fn two_jobs_without_an_id_do_not_meet_each_other() {
    const TEST: &str =
        "world::rendezvous::tests::launchers::two_jobs_without_an_id_do_not_meet_each_other";
    if let Some(config) = as_rank(TEST) {
        return meet(&config);
    }
    // A launcher that sets the variables that MPICH's sets.
    let script = r#"for rank in 0 1 2; do
            PMI_RANK=$rank PMI_SIZE=3 MPI_LOCALRANKID=$rank MPI_LOCALNRANKS=3 "$@" &
            ranks="$ranks $!"
        done
        for rank in $ranks; do wait $rank || exit 1; done"#;
    run_pairs(4, TEST, || {
        let mut launcher = Command::new("/bin/sh");
        launcher.args(["-c", script, "launcher"]).args(rank_command(TEST));
        launcher
    });
}

/// Returns the launcher of MPICH: that of `cargo xtask test`, else this host's, if it has one.
fn mpiexec() -> Option<OsString> {
    let fetched = std::env::var_os("DEVCOMM_TEST_MPIEXEC");
    let programs = fetched.into_iter().chain(["mpiexec.hydra", "mpiexec"].map(OsString::from));
    programs.into_iter().find(|program| {
        let version = Command::new(program).arg("--version").output();
        version.is_ok_and(|version| String::from_utf8_lossy(&version.stdout).contains("HYDRA"))
    })
}

#[test]
fn two_jobs_of_mpiexec_do_not_meet_each_other() {
    const TEST: &str =
        "world::rendezvous::tests::launchers::two_jobs_of_mpiexec_do_not_meet_each_other";
    if let Some(config) = as_rank(TEST) {
        return meet(&config);
    }
    let Some(mpiexec) = mpiexec() else {
        let reason = "there is no mpiexec of MPICH (`pip install mpich`)";
        // Past the harness's capture: `cargo xtask test` counts such lines.
        let _ = writeln!(std::io::stdout(), "SKIPPED {TEST}: {reason}");
        return;
    };
    run_pairs(20, TEST, || {
        let mut launcher = Command::new(&mpiexec);
        launcher.args(["-n", "3"]).args(rank_command(TEST));
        launcher
    });
}
