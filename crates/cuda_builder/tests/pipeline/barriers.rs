//! A barrier between two tests of one condition stays one barrier.

use std::path::Path;

use libtest_mimic::Trial;

use crate::support::Needs::{Nccl, Nightly, RustSource};
use crate::support::{NIGHTLY, Outcome, Package, body, ensure, test};

pub fn tests() -> Vec<Trial> {
    vec![
        test("a_barrier_between_two_tests_stays_one_barrier", &[RustSource, Nccl], || {
            stay_one("barriers", None)
        }),
        test(
            "a_barrier_between_two_tests_stays_one_barrier_on_nightly",
            &[RustSource, Nccl, Nightly],
            || stay_one("barriers_nightly", NIGHTLY.as_deref()),
        ),
    ]
}

fn stay_one(folder: &str, rustc: Option<&Path>) -> Outcome {
    let mut builder = Package::fixture(folder).builder();
    if let Some(rustc) = rustc {
        builder = builder.rustc(rustc);
    }
    let artifacts = builder.build()?;
    let barriers = |kernel| {
        let body = body(&artifacts, kernel);
        body.matches("bar.sync").count() + body.matches("barrier.").count()
    };
    // Once as a call, as assembly, through a pointer, and by NCCL's group.
    for kernel in ["barrier_call", "barrier_asm", "barrier_indirect", "barrier_coop"] {
        let found = barriers(kernel);
        ensure(found == 1, format!("{kernel} has {found} barriers in place of one"))?;
    }
    // NCCL's own barrier is made of several: as many as without a condition around it.
    let (alone, between) = (barriers("barrier_lsa_alone"), barriers("barrier_lsa"));
    ensure(alone > 0, "NCCL's barrier has no barrier in it")?;
    ensure(between == alone, format!("NCCL's barrier of {alone} became {between}"))
}
