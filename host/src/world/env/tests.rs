//! Tests with the variables that each launcher sets, with nested launchers, and with invalid
//! values.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use super::*;

type Vars<'a> = &'a [(&'a str, &'a str)];

const TORCHRUN: Vars<'static> = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("GROUP_RANK", "1"),
    ("ROLE_RANK", "5"),
    ("ROLE_WORLD_SIZE", "8"),
    ("MASTER_ADDR", "node0"),
    ("MASTER_PORT", "29500"),
];

/// mpirun of Open MPI 4, all ranks on one host.
const OPEN_MPI: Vars<'static> = &[
    ("OMPI_COMM_WORLD_RANK", "2"),
    ("OMPI_COMM_WORLD_SIZE", "4"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ("OMPI_COMM_WORLD_NODE_RANK", "2"),
    ("OMPI_UNIVERSE_SIZE", "4"),
    ("OMPI_MCA_ess_base_jobid", "2736717825"),
    ("PMIX_NAMESPACE", "2736717825"),
    ("PMIX_RANK", "2"),
];

/// mpiexec of MPICH and of Intel MPI, all ranks on one host.
const MPICH: Vars<'static> = &[
    ("PMI_RANK", "3"),
    ("PMI_SIZE", "4"),
    ("PMI_FD", "9"),
    ("MPI_LOCALRANKID", "3"),
    ("MPI_LOCALNRANKS", "4"),
];

/// A batch script of an allocation of two hosts, or a shell of salloc: not a rank.
const ALLOCATION: Vars<'static> = &[
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_JOBID", "4711"),
    ("SLURM_JOB_NODELIST", "gpu[03,07]"),
    ("SLURM_NODELIST", "gpu[03,07]"),
    ("SLURM_NNODES", "2"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_NPROCS", "8"),
    ("SLURM_PROCID", "0"),
    ("SLURM_LOCALID", "0"),
    ("SLURM_NODEID", "0"),
];

/// mpirun_rsh of MVAPICH2, all ranks on one host.
const MVAPICH2: Vars<'static> = &[
    ("MV2_COMM_WORLD_RANK", "1"),
    ("MV2_COMM_WORLD_SIZE", "2"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "1"),
    ("MV2_COMM_WORLD_LOCAL_SIZE", "2"),
];

/// The variables that srun adds for task 5 of 8.
const SRUN: Vars<'static> = &[
    ("SLURM_STEP_ID", "2"),
    ("SLURM_STEPID", "2"),
    ("SLURM_STEP_NUM_TASKS", "8"),
    ("SLURM_STEP_NODELIST", "gpu[03,07]"),
    ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
    ("SLURM_PROCID", "5"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
];

/// Returns the launched process with these variables. Later values override earlier ones.
fn try_with(sets: &[Vars<'_>]) -> Result<Option<Launched>> {
    let vars: HashMap<_, _> = sets.iter().copied().flatten().copied().collect();
    launched(&|name| vars.get(name).map(OsString::from))
}

fn with(sets: &[Vars<'_>]) -> Launched {
    try_with(sets).unwrap().unwrap()
}

fn error(sets: &[Vars<'_>]) -> String {
    try_with(sets).unwrap_err().to_string()
}

/// Returns the id of a job of this user that its launcher calls `job`.
fn by_this_user(job: &str) -> String {
    format!("{job} of user {}", rustix::process::getuid().as_raw())
}

fn ranks(launched: &Launched) -> (usize, usize, usize) {
    (launched.rank, launched.n_ranks, launched.local_rank)
}

#[test]
fn without_a_launcher_a_process_is_no_rank() {
    assert_eq!(try_with(&[]).unwrap(), None);
    assert_eq!(try_with(&[&[("MASTER_ADDR", "node0"), ("MASTER_PORT", "x")]]).unwrap(), None);
}

#[test]
fn torchruns_variables_make_one_rank() {
    let expected = Launched {
        variable: "RANK",
        rank: 5,
        n_ranks: 8,
        local_rank: 1,
        host: "node0".into(),
        port: 29500,
        job: by_this_user("none"),
        timeout: Duration::from_secs(60),
        deadline: Some(Duration::from_secs(600)),
        token: None,
        listener: None,
    };
    assert_eq!(with(&[TORCHRUN]), expected);
    let run = [("TORCHELASTIC_RUN_ID", "abc")];
    assert_eq!(with(&[TORCHRUN, &run]).job, by_this_user("abc"));
    assert_eq!(with(&[TORCHRUN, &run, &[("DEVCOMM_JOB_ID", "x")]]).job, "x");
    let short = with(&[TORCHRUN, &[("DEVCOMM_TIMEOUT", "2.5")]]);
    assert_eq!(short.timeout, Duration::from_millis(2500));
    let deadline = |seconds| with(&[TORCHRUN, &[("DEVCOMM_OPERATION_TIMEOUT", seconds)]]).deadline;
    assert_eq!(deadline("1.5"), Some(Duration::from_millis(1500)));
    assert_eq!(deadline("0"), None);
}

#[test]
fn the_port_is_the_next_one_when_torchrun_holds_the_masters() {
    let holds = |holds| [("TORCHELASTIC_USE_AGENT_STORE", holds)];
    assert_eq!(with(&[TORCHRUN, &holds("True")]).port, 29501);
    assert_eq!(with(&[TORCHRUN, &holds("False")]).port, 29500);
    assert_eq!(with(&[TORCHRUN, &holds("True"), &[("DEVCOMM_PORT", "7000")]]).port, 7000);
    let last = error(&[TORCHRUN, &holds("True"), &[("MASTER_PORT", "65535")]]);
    assert!(last.contains("DEVCOMM_PORT"), "{last}");
}

#[test]
fn a_rank_alone_needs_no_address() {
    let alone = with(&[&[("RANK", "0"), ("WORLD_SIZE", "1")]]);
    assert_eq!(ranks(&alone), (0, 1, 0));
    let alone = with(&[&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]]);
    assert_eq!(ranks(&alone), (0, 1, 0));
}

#[test]
fn plain_variables_without_a_local_rank_or_an_address_are_an_error() {
    for variable in ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"] {
        let error = error(&[TORCHRUN, &[(variable, "")]]);
        assert!(error.starts_with(&format!("{variable}: not set although RANK is;")), "{error}");
        assert!(error.contains("torchrun"), "{error}");
    }
}

#[test]
fn open_mpis_ranks_of_one_host_meet_there() {
    let rank = with(&[OPEN_MPI]);
    assert_eq!(ranks(&rank), (2, 4, 2));
    assert_eq!(rank.host, "127.0.0.1");
    assert!(PORTS.contains(&rank.port));
    // Version 5 has another format of job names.
    let five = with(&[OPEN_MPI, &[("PMIX_NAMESPACE", "prterun-gpu03-91234@1")]]);
    assert_ne!(five.port, rank.port);
    let mvapich2 = with(&[MVAPICH2]);
    assert_eq!((ranks(&mvapich2), mvapich2.host.as_str()), ((1, 2, 1), "127.0.0.1"));
}

#[test]
fn mpichs_and_intels_ranks_of_one_host_meet_there() {
    let rank = with(&[MPICH]);
    assert_eq!((ranks(&rank), rank.host.as_str()), ((3, 4, 3), "127.0.0.1"));
    // PALS sets PMI's variables and its own.
    let pals = with(&[&[
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "2"),
        ("PMI_LOCAL_RANK", "1"),
        ("PMI_LOCAL_SIZE", "2"),
        ("PALS_RANKID", "1"),
        ("PALS_LOCAL_RANKID", "1"),
        ("PALS_APID", "a-b-c"),
    ]]);
    assert_eq!(ranks(&pals), (1, 2, 1));
    assert!(pals.job.starts_with("PALS_APID=a-b-c of "), "{}", pals.job);
}

#[test]
fn mpi_over_several_hosts_needs_the_masters_address() {
    let spread: [(Vars<'_>, &str); 2] =
        [(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), (MPICH, "MPI_LOCALNRANKS")];
    for (launcher, n_local) in spread {
        for two in ["2", ""] {
            let local =
                [(n_local, two), ("OMPI_COMM_WORLD_LOCAL_RANK", "1"), ("MPI_LOCALRANKID", "1")];
            let error = error(&[launcher, &local]);
            assert!(error.starts_with("MASTER_ADDR: not set"), "{error}");
            assert!(error.contains("set MASTER_ADDR to the host of rank 0"), "{error}");
            let address = [("MASTER_ADDR", "n7"), ("MASTER_PORT", "99")];
            let id = [("DEVCOMM_JOB_ID", if launcher == MPICH { "j" } else { "" })];
            let given = with(&[launcher, &local, &address, &id]);
            assert_eq!((given.host.as_str(), given.port, given.local_rank), ("n7", 99, 1));
        }
    }
}

#[test]
fn a_job_that_its_launcher_gives_no_id_has_that_of_the_process_that_started_it() {
    let starter = starter::starter("PMI_RANK", "3").unwrap();
    assert_eq!(with(&[MPICH]).job, by_this_user(&starter));
    // Jobs in one batch job, and ids that two users, or two hosts, may have both.
    assert_eq!(with(&[ALLOCATION, MPICH]).job, by_this_user(&starter));
    let jobs = [(MPICH, "I_MPI_HYDRA_UUID"), (OPEN_MPI, "PMIX_NAMESPACE")];
    for (launcher, variable) in jobs {
        let job = with(&[launcher, &[(variable, "7")]]).job;
        assert_eq!(job, by_this_user(&format!("{variable}=7 of {starter}")));
    }
    let starter = starter::starter("MV2_COMM_WORLD_RANK", "1").unwrap();
    assert_eq!(with(&[ALLOCATION, MVAPICH2]).job, by_this_user(&starter));
}

#[test]
fn a_job_of_several_hosts_has_an_id_that_all_of_them_know() {
    let spread = [("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "1"), ("MASTER_ADDR", "n7")];
    let batch = [("PBS_JOBID", "17"), ("SLURM_JOB_ID", "18")];
    let error = error(&[MPICH, &spread, &batch]);
    assert!(error.starts_with("DEVCOMM_JOB_ID: not set; "), "{error}");
    assert!(error.contains("set it to what no other job has, for all ranks alike"), "{error}");
    let uuid = [("I_MPI_HYDRA_UUID", "2d0e")];
    assert_eq!(with(&[MPICH, &spread, &uuid]).job, by_this_user("I_MPI_HYDRA_UUID=2d0e"));
    assert_eq!(with(&[MPICH, &spread, &uuid, &[("DEVCOMM_JOB_ID", "x")]]).job, "x");
}

#[test]
fn a_task_of_srun_is_a_rank_and_rank_0_is_on_the_first_host() {
    let rank = with(&[ALLOCATION, SRUN]);
    assert_eq!((ranks(&rank), rank.host.as_str()), ((5, 8, 1), "gpu03"));
    assert_eq!(rank.job, by_this_user("slurm-4711.2"));
    assert!(PORTS.contains(&rank.port));
    // The step's hosts, if set; else those of the job, under the variable's new or old name.
    let fewer = [("SLURM_STEP_NODELIST", "gpu07,gpu09")];
    assert_eq!(with(&[ALLOCATION, SRUN, &fewer]).host, "gpu07");
    let none = [("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_NODELIST", "a[1-2]")];
    assert_eq!(with(&[ALLOCATION, SRUN, &none]).host, "a1");
    let older = [("SLURM_STEP_NODELIST", ""), ("SLURM_JOB_NODELIST", "")];
    assert_eq!(with(&[ALLOCATION, SRUN, &older]).host, "gpu03");
    // A job on one host uses the loopback address.
    assert_eq!(with(&[ALLOCATION, SRUN, &[("SLURM_STEP_NODELIST", "gpu03")]]).host, "127.0.0.1");
    let older = [("SLURM_STEP_ID", ""), ("SLURM_STEP_NUM_TASKS", "")];
    assert_eq!(ranks(&with(&[ALLOCATION, SRUN, &older])), (5, 8, 1));
    let master = [("MASTER_ADDR", "head"), ("MASTER_PORT", "1234")];
    let given = with(&[ALLOCATION, SRUN, &master, &[("SLURM_STEP_NODELIST", "n[1-")]]);
    assert_eq!((given.host.as_str(), given.port), ("head", 1234));
}

#[test]
fn a_shell_inside_an_allocation_is_no_rank() {
    assert_eq!(try_with(&[ALLOCATION]).unwrap(), None);
    // Reserved steps: salloc's interactive shell, the batch script, external processes.
    for step in ["4294967290", "4294967291", "4294967292"] {
        let step = [("SLURM_STEP_ID", step), ("SLURM_STEP_NUM_TASKS", "1")];
        assert_eq!(try_with(&[ALLOCATION, SRUN, &step]).unwrap(), None);
    }
    let task_0 = [("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")];
    assert_eq!(ranks(&with(&[ALLOCATION, SRUN, &task_0])), (0, 1, 0));
    let pty = [("SLURM_PTY_PORT", "41234"), ("SLURM_PTY_WIN_COL", "80")];
    assert_eq!(try_with(&[ALLOCATION, SRUN, &task_0, &pty]).unwrap(), None);
    assert_eq!(ranks(&with(&[ALLOCATION, SRUN, &pty])), (5, 8, 1));
}

#[test]
fn the_innermost_launcher_counts() {
    // One torchrun per host, started by srun.
    let torchrun = with(&[ALLOCATION, SRUN, TORCHRUN]);
    assert_eq!((torchrun.host.as_str(), torchrun.port), ("node0", 29500));
    // mpirun in a batch script, and its daemons started by srun.
    let from_script = with(&[ALLOCATION, OPEN_MPI]);
    assert_eq!((ranks(&from_script), from_script.host.as_str()), ((2, 4, 2), "127.0.0.1"));
    assert_eq!(ranks(&with(&[ALLOCATION, SRUN, OPEN_MPI])), (2, 4, 2));
    assert_eq!(ranks(&with(&[ALLOCATION, SRUN, MPICH])), (3, 4, 3));
    // In a shell that srun started.
    let pty = [("SLURM_PTY_PORT", "1"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")];
    assert_eq!(ranks(&with(&[ALLOCATION, SRUN, &pty, MPICH])), (3, 4, 3));
    assert_eq!(ranks(&with(&[ALLOCATION, OPEN_MPI, MPICH, TORCHRUN])), (5, 8, 1));
}

#[test]
fn sruns_own_variables_of_pmi_leave_the_rest_to_slurm() {
    let pmi2 = [("PMI_RANK", "5"), ("PMI_SIZE", "8"), ("PMI_FD", "7"), ("PMI_JOBID", "4711.2")];
    assert_eq!(with(&[ALLOCATION, SRUN, &pmi2]), with(&[ALLOCATION, SRUN]));
    let differing = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
    assert!(error(&[ALLOCATION, SRUN, &differing]).starts_with("MPI_LOCALRANKID: not set"));
}

#[test]
fn half_of_a_launchers_variables_are_an_error_that_names_it() {
    let cases: [(Vars<'_>, &str, &str); 13] = [
        (SRUN, "SLURM_JOB_ID", "srun"),
        (TORCHRUN, "RANK", "torchrun"),
        (TORCHRUN, "WORLD_SIZE", "torchrun"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "Open MPI"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "Open MPI"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI"),
        (MPICH, "PMI_RANK", "MPICH"),
        (MPICH, "PMI_SIZE", "MPICH"),
        (MPICH, "MPI_LOCALRANKID", "MPICH"),
        (SRUN, "SLURM_PROCID", "srun"),
        (SRUN, "SLURM_LOCALID", "srun"),
        (SRUN, "SLURM_STEP_NUM_TASKS", "srun"),
        (SRUN, "SLURM_STEP_NODELIST", "srun"),
    ];
    for (launcher, variable, name) in cases {
        let error = error(&[launcher, &[(variable, "")]]);
        assert!(error.starts_with(&format!("{variable}: not set")), "{variable}: {error}");
        assert!(error.contains(name), "{variable}: {error}");
    }
}

#[test]
fn a_value_that_makes_no_sense_is_named() {
    let numbers = ["-1", "one", "1.5", "99999999999999999999999", "0x1", "4294967296"];
    let variables: [(Vars<'_>, &str); 13] = [
        (TORCHRUN, "RANK"),
        (TORCHRUN, "WORLD_SIZE"),
        (TORCHRUN, "LOCAL_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPICH, "PMI_RANK"),
        (MPICH, "PMI_SIZE"),
        (MPICH, "MPI_LOCALRANKID"),
        (SRUN, "SLURM_PROCID"),
        (SRUN, "SLURM_STEP_NUM_TASKS"),
        (SRUN, "SLURM_STEP_ID"),
    ];
    for (launcher, variable) in variables {
        for value in numbers {
            let error = error(&[launcher, &[(variable, value)]]);
            assert!(error.starts_with(&format!("{variable}={value:?}: ")), "{error}");
        }
    }
    // Values out of range: a rank of at least WORLD_SIZE, a local rank of at least the local size.
    let cases: [(Vars<'_>, &str, &str); 18] = [
        (TORCHRUN, "RANK", "8"),
        (TORCHRUN, "WORLD_SIZE", "0"),
        (TORCHRUN, "LOCAL_RANK", "9"),
        (TORCHRUN, "MASTER_PORT", "0"),
        (TORCHRUN, "MASTER_PORT", "65536"),
        (TORCHRUN, "DEVCOMM_PORT", "port"),
        (TORCHRUN, "DEVCOMM_TIMEOUT", "0"),
        (TORCHRUN, "DEVCOMM_TIMEOUT", "NaN"),
        (TORCHRUN, "DEVCOMM_TIMEOUT", "soon"),
        (TORCHRUN, "DEVCOMM_OPERATION_TIMEOUT", "-1"),
        (TORCHRUN, "DEVCOMM_OPERATION_TIMEOUT", "NaN"),
        (TORCHRUN, "WORLD_SIZE", "18446744073709551615"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "4"),
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "5"),
        (OPEN_MPI, "MASTER_PORT", "none"),
        (MPICH, "MPI_LOCALRANKID", "4"),
        (SRUN, "SLURM_PROCID", "8"),
        (SRUN, "SLURM_STEP_NODELIST", "gpu[3-1]"),
    ];
    for (launcher, variable, value) in cases {
        let error = error(&[launcher, &[(variable, value)]]);
        assert!(error.starts_with(&format!("{variable}={value:?}: ")), "{error}");
    }
    let long = "x".repeat(MAX_JOB_ID + 1);
    assert!(error(&[TORCHRUN, &[("DEVCOMM_JOB_ID", &long)]]).starts_with("DEVCOMM_JOB_ID: "));
    let infinite = with(&[TORCHRUN, &[("DEVCOMM_TIMEOUT", "inf")]]);
    assert!(infinite.timeout > Duration::from_secs(1 << 20));
}

#[test]
fn devcomm_log_names_levels() {
    let parsed = |value: &str| log_filter(&|_| Some(value.into()));
    let filter = parsed("devcomm_host=debug,warn").unwrap().unwrap();
    assert!(filter.would_enable("devcomm_host::world", &tracing::Level::DEBUG));
    assert!(!filter.would_enable("devcomm_sim", &tracing::Level::INFO));
    assert!(parsed("").unwrap().is_none());
    let error = parsed("devcomm_host=loud").unwrap_err().to_string();
    assert!(error.starts_with("DEVCOMM_LOG=\"devcomm_host=loud\": neither a level"), "{error}");
}

#[test]
fn a_value_that_is_not_text_is_an_error() {
    for variable in ["RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "SLURM_STEP_ID"] {
        let binary = |name: &str| (name == variable).then(|| OsString::from_vec(vec![0xff]));
        let error = launched(&binary).unwrap_err().to_string();
        assert!(error.starts_with(variable) && error.contains("not UTF-8"), "{error}");
    }
}

#[test]
fn every_rank_of_a_job_finds_the_same_port_and_other_jobs_find_others() {
    let port = |step: &str, rank: &str| {
        with(&[ALLOCATION, SRUN, &[("SLURM_STEP_ID", step), ("SLURM_PROCID", rank)]]).port
    };
    let ports: Vec<u16> = (0..200).map(|step| port(&step.to_string(), "0")).collect();
    for (step, &found) in ports.iter().enumerate() {
        assert!(found > 20_000 && found < 32_768, "{found}");
        assert_eq!(port(&step.to_string(), "7"), found);
    }
    let different: std::collections::HashSet<_> = ports.iter().collect();
    assert!(different.len() > 190, "{}", different.len());
}

#[test]
fn only_rank_0_takes_a_socket_over() {
    let listener = [("DEVCOMM_LISTENER", "7")];
    assert_eq!(with(&[TORCHRUN, &listener]).listener, None);
    assert_eq!(with(&[TORCHRUN, &[("RANK", "0")], &listener]).listener, Some(7));
    for bad in ["2", "-1", "x", "99999999999"] {
        let error = error(&[TORCHRUN, &[("RANK", "0"), ("DEVCOMM_LISTENER", bad)]]);
        assert!(error.starts_with("DEVCOMM_LISTENER"), "{error}");
    }
}

#[test]
fn a_token_in_a_file_is_for_its_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    let file = [("DEVCOMM_JOB_TOKEN_FILE", path.to_str().unwrap())];
    let write = |text: &str, mode| {
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let error = |file: &[(&str, &str)]| {
        let vars = [TORCHRUN, file].concat();
        let var = |name: &str| vars.iter().find(|(own, _)| *own == name).map(|(_, v)| v.into());
        launched(&var).unwrap_err().to_string()
    };
    assert!(error(&file).contains("No such file"));
    write("a secret of ranks\n", 0o640);
    assert!(error(&file).contains("others may use it (mode 640): chmod 600 it"));
    write(" \n", 0o600);
    assert!(error(&file).contains("it is blank"));
    write("secret\n", 0o600);
    assert!(error(&file).contains("it has 6 characters"));
    write("a secret of ranks\n", 0o600);
    let token = with(&[TORCHRUN, &file]).token;
    assert_eq!(token, with(&[TORCHRUN, &[("DEVCOMM_JOB_TOKEN", "a secret of ranks")]]).token);
    assert!(token.is_some());
}

#[test]
fn a_token_that_is_blank_or_short_is_refused_and_not_shown() {
    for (token, why) in [("", "it is blank"), (" ", "it is blank"), ("secret", "6 characters")] {
        let error = error(&[TORCHRUN, &[("DEVCOMM_JOB_TOKEN", token)]]);
        assert!(error.starts_with("DEVCOMM_JOB_TOKEN: ") && error.contains(why), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
    assert!(error(&[TORCHRUN, &[("DEVCOMM_JOB_TOKEN_FILE", "")]]).contains("No such file"));
}

#[test]
fn an_ipv6_address_may_have_brackets() {
    let host = |host| with(&[TORCHRUN, &[("MASTER_ADDR", host)]]).host;
    assert_eq!(
        (host("[::1]"), host("::1"), host("node")),
        ("::1".into(), "::1".into(), "node".into())
    );
    assert_eq!(host("[fe80::1%eth0]"), "fe80::1%eth0");
}
