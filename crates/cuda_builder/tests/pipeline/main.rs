//! The whole pipeline from a kernel package to PTX, with the installed toolchain and NCCL.
//!
//! The harness is libtest-mimic: this program is also the build's worker (it must reach
//! `link_worker` first), and acts as a build script for tests that need one with its own
//! environment.

mod barriers;
mod cache;
mod errors;
mod gin;
mod inlining;
mod layout;
mod linked;
mod registry;
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
        inlining::tests(),
        linked::tests(),
        registry::tests(),
        gin::tests(),
        cache::tests(),
        errors::tests(),
    ]
    .concat_all();
    let conclusion: Conclusion = libtest_mimic::run(&Arguments::from_args(), tests);
    conclusion.exit();
}

/// Concatenates lists of trials, which are not `Clone`.
trait ConcatAll {
    fn concat_all(self) -> Vec<Trial>;
}

impl<const N: usize> ConcatAll for [Vec<Trial>; N] {
    fn concat_all(self) -> Vec<Trial> {
        self.into_iter().flatten().collect()
    }
}
