//! The whole way from a kernel package to PTX, on the toolchain and the NCCL that are installed.
//!
//! The harness is libtest-mimic: this program is also the build's worker (it must reach
//! `link_worker` first), and stands in for a build script where a test needs one with an
//! environment of its own.

mod barriers;
mod cache;
mod errors;
mod gin;
mod layout;
mod linked;
mod support;

use libtest_mimic::{Arguments, Conclusion, Trial};

fn main() {
    cuda_builder::link_worker();
    if support::is_build_script() {
        return support::build_script();
    }
    let tests: Vec<Trial> = [
        barriers::tests(),
        layout::tests(),
        linked::tests(),
        gin::tests(),
        cache::tests(),
        errors::tests(),
    ]
    .concat_all();
    let conclusion: Conclusion = libtest_mimic::run(&Arguments::from_args(), tests);
    conclusion.exit();
}

/// Joins lists of trials, which cannot be cloned.
trait ConcatAll {
    fn concat_all(self) -> Vec<Trial>;
}

impl<const N: usize> ConcatAll for [Vec<Trial>; N] {
    fn concat_all(self) -> Vec<Trial> {
        self.into_iter().flatten().collect()
    }
}
