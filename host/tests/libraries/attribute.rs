//! Tests of what `#[devcomm::test]` runs where there are GPUs.

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};

use devcomm_host::{Error, Library, Rank, Result, WITHOUT_PTX, run_test};

use crate::support::tests;

tests! {
    a_program_without_ptx_is_tested_on_simulated_gpus_although_there_are_gpus,
    a_test_is_simulated_where_there_are_gpus_but_no_nccl in [
        "DEVCOMM_NCCL_HOME" = "/nonexistent",
        "NCCL_HOME" = "/nonexistent",
        "DEVCOMM_CACHE" = "/nonexistent"
    ],
    a_test_that_fails_on_gpus_is_not_simulated,
    a_program_without_ptx_fails_where_gpus_are_asked_for in ["DEVCOMM_TEST_GPUS" = "1"],
}

/// The runs of two ranks under each of the nine schedules of `run_test`.
const SIMULATED_RUNS: usize = 2 * 9;

/// The times that ranks have run: on GPUs, and on simulated ones.
#[derive(Default)]
struct Runs([AtomicUsize; 2]);

impl Runs {
    fn count(&self, rank: &Rank) {
        self.0[usize::from(rank.is_simulated())].fetch_add(1, Ordering::Relaxed);
    }

    fn counted(self) -> [usize; 2] {
        self.0.map(AtomicUsize::into_inner)
    }
}

fn a_program_without_ptx_is_tested_on_simulated_gpus_although_there_are_gpus() {
    for panics in [false, true] {
        let runs = Runs::default();
        run_test("loads", "2", |rank| -> Result<()> {
            runs.count(rank);
            let loaded = rank.load(&WITHOUT_PTX);
            if panics {
                loaded.unwrap();
                return Ok(());
            }
            loaded
        });
        let [on_gpus, simulated] = runs.counted();
        assert!(on_gpus > 0 && simulated == SIMULATED_RUNS, "{on_gpus} {simulated}");
    }
}

fn a_test_is_simulated_where_there_are_gpus_but_no_nccl() {
    let runs = Runs::default();
    run_test("meets", "2", |rank| {
        runs.count(rank);
        rank.barrier()
    });
    // Python's packages or the system may have an NCCL.
    let expected = if Library::open(None).is_ok() { [2, 0] } else { [0, SIMULATED_RUNS] };
    assert_eq!(runs.counted(), expected);
}

fn a_test_that_fails_on_gpus_is_not_simulated() {
    let runs = Runs::default();
    let failed = catch_unwind(|| {
        run_test("fails", "2", |rank| -> Result<()> {
            runs.count(rank);
            Err(Error::InvalidInput { what: "wrong sums".to_owned() })
        });
    });
    assert!(failed.unwrap_err().downcast_ref::<String>().unwrap().contains("wrong sums"));
    assert_eq!(runs.counted()[1], 0);
}

fn a_program_without_ptx_fails_where_gpus_are_asked_for() {
    let failed = catch_unwind(|| run_test("loads", "2", |rank| rank.load(&WITHOUT_PTX)));
    let failed = failed.unwrap_err();
    let text = failed.downcast_ref::<String>().unwrap();
    assert!(text.contains("built without PTX") && text.contains("--features ptx"), "{text}");
}
