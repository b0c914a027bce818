//! A matrix product that runs on another stream while a collective does.

use std::rc::Rc;

use devcomm::{Event, Gemm, Stream, SymmetricBuffer};
use devcomm_testing::gemm::{Factor, Problem};
use half::bf16;

use super::prelude::*;
use crate::contenders::contender::Work;

/// `C = A x B^T` in bf16 on a stream of its own.
pub struct ConcurrentProduct<'a> {
    harness: &'a Harness<'a>,
    shape: [usize; 3],
    gemm: Gemm,
    stream: Stream,
    factors: [SymmetricBuffer<bf16>; 2],
    c: SymmetricBuffer<bf16>,
    /// When the product may begin, and when it has ended.
    events: [Event; 2],
}

impl<'a> ConcurrentProduct<'a> {
    pub fn new(harness: &'a Harness<'a>, shape: &[usize]) -> Result<Self> {
        ensure!(
            shape.len() == 3 && !shape.contains(&0),
            "--beside {shape:?}: a product has the extents M,N,K"
        );
        let (comm, [m, n, k]) = (harness.comm, [shape[0], shape[1], shape[2]]);
        let problem = Problem { m, n, k, seed: harness.run.seed };
        let stream = harness.rank.stream()?;
        let filled = |factor| harness.filled(&problem.noise(factor, 0));
        let factors = [filled(Factor::A)?, filled(Factor::B)?];
        let event = || harness.rank.context().event();
        Ok(Self {
            harness,
            shape: [m, n, k],
            gemm: Gemm::new(&stream)?,
            stream,
            factors,
            c: comm.mem_alloc(m * n)?,
            events: [event()?, event()?],
        })
    }

    /// Enqueues the other work on the harness's stream and the product on its own; then the
    /// harness's stream waits for the product.
    fn with(&self, other: &dyn Fn() -> devcomm::Result<()>) -> devcomm::Result<()> {
        let ([begin, end], main) = (&self.events, &self.harness.stream);
        main.record(begin)?;
        self.stream.wait_event(begin)?;
        let [a, b] = &self.factors;
        self.gemm.launch(a, b, &self.c, self.shape)?;
        other()?;
        self.stream.record(end)?;
        main.wait_event(end)
    }

    /// Returns the contender that runs during the product. It is a collective, whose checked work
    /// is also the timed one.
    pub fn join<'b>(&'b self, contender: Contender<'b>) -> Contender<'b> {
        let alone = Rc::clone(&contender.checked);
        let work: Work<'b> = Rc::new(move || self.with(&*alone));
        Contender { timed: Rc::clone(&work), checked: work, ..contender }
    }

    /// Returns the product alone.
    pub fn alone(&self) -> Contender<'_> {
        Contender::new(Variant::RustGemm, || self.with(&|| Ok(())), ())
    }
}
