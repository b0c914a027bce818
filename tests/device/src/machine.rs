//! What runs the test kernels.

use devcomm::{GinConnectionType, HostKernel};
use devcomm_device_test_kernels::Args;

/// What a kernel needs: its launch, its windows, and the resources of its device communicator.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Words of the first window, which begins as zeros.
    pub mail: usize,
    /// Words of the second window, which begins as [`UNTOUCHED`](Self::UNTOUCHED).
    pub out: usize,
    /// LSA barriers.
    pub lsa_barriers: u32,
    /// LSA barriers in addition, as `Extra::lsa`.
    pub more_lsa_barriers: u32,
    /// A multicast mapping of the LSA team.
    pub multimem: bool,
    /// Bytes of a resource buffer, `Extra::buffer`.
    pub buffer: usize,
    /// Blocks, elements and bytes an element of `Extra::ll`.
    pub ll: (u32, u32, u32),
    /// Who is connected.
    pub gin: GinConnectionType,
    /// Contexts.
    pub contexts: u32,
    /// Signals, `Extra::signals`.
    pub signals: u32,
    /// Counters, `Extra::counters`.
    pub counters: u32,
    /// Barriers over the network between all ranks.
    pub world_barriers: u32,
    /// The same in addition, as `Extra::gin`.
    pub more_gin_barriers: u32,
    /// Barriers over the network between the rail's ranks.
    pub rail_barriers: u32,
    /// Hybrid barriers.
    pub hybrid_barriers: u32,
    /// Whether signals are strong unless they say otherwise.
    pub strong: bool,
    /// Signals in the first window.
    pub va: bool,
}

impl Setup {
    /// What nobody has written in the second window.
    pub const UNTOUCHED: u64 = u64::MAX;

    /// `grid` blocks of `block` threads, with an LSA barrier a block, and a word a thread to report.
    pub fn new(grid: u32, block: u32) -> Self {
        Self {
            grid,
            block,
            mail: 1024,
            out: (grid * block) as usize,
            lsa_barriers: grid,
            more_lsa_barriers: 0,
            multimem: false,
            buffer: 0,
            ll: (0, 0, 0),
            gin: GinConnectionType::None,
            contexts: 4,
            signals: 0,
            counters: 0,
            world_barriers: 0,
            more_gin_barriers: 0,
            rail_barriers: 0,
            hybrid_barriers: 0,
            strong: true,
            va: false,
        }
    }

    /// The same with GIN: all ranks connected, two signals and two counters.
    pub fn with_gin(grid: u32, block: u32) -> Self {
        let (gin, signals, counters) = (GinConnectionType::Full, 2, 2);
        Self { gin, signals, counters, ..Self::new(grid, block) }
    }
}

/// A kernel of `devcomm-device-test-kernels`.
pub trait TestKernel: HostKernel<Args = Args> + Sync {}

impl<K: HostKernel<Args = Args> + Sync> TestKernel for K {}

/// Ranks that run kernels.
pub trait Machine {
    /// How many.
    fn ranks(&self) -> usize;

    /// How many neighbours reach each other by load and store.
    fn lsa_ranks(&self) -> usize;

    /// How often a kernel is launched where one that goes wrong now and then is to be found.
    fn launches(&self) -> usize;

    /// Launches `kernel` in every rank with one device communicator, once for each number of `ns`, one launch after the other has ended
    /// everywhere. Gives what is in the second window of each rank in the end.
    ///
    /// # Panics
    ///
    /// If anything fails.
    fn run<K: TestKernel>(&self, kernel: K, setup: &Setup, ns: &[u32]) -> Vec<Vec<u64>> {
        self.run_two(kernel, kernel, setup, &[], ns)
    }

    /// [`run`](Self::run), after another kernel with the same device communicator and the numbers `before`.
    ///
    /// # Panics
    ///
    /// If anything fails.
    fn run_two<P: TestKernel, K: TestKernel>(
        &self,
        prepare: P,
        kernel: K,
        setup: &Setup,
        before: &[u32],
        ns: &[u32],
    ) -> Vec<Vec<u64>> {
        self.run_each_after(prepare, kernel, setup, before, ns).pop().expect("a launch")
    }

    /// [`run`](Self::run), with what was in the second windows after each launch.
    ///
    /// # Panics
    ///
    /// If anything fails.
    fn run_each<K: TestKernel>(&self, kernel: K, setup: &Setup, ns: &[u32]) -> Vec<Vec<Vec<u64>>> {
        self.run_each_after(kernel, kernel, setup, &[], ns)
    }

    /// [`run_each`](Self::run_each), with the same number each time, as often as [`launches`](Self::launches) says.
    ///
    /// # Panics
    ///
    /// If anything fails.
    fn run_often<K: TestKernel>(&self, kernel: K, setup: &Setup, n: u32) -> Vec<Vec<Vec<u64>>> {
        self.run_each(kernel, setup, &vec![n; self.launches()])
    }

    /// [`run_each`](Self::run_each), after another kernel with the same device communicator and the numbers `before`.
    ///
    /// # Panics
    ///
    /// If anything fails.
    fn run_each_after<P: TestKernel, K: TestKernel>(
        &self,
        prepare: P,
        kernel: K,
        setup: &Setup,
        before: &[u32],
        ns: &[u32],
    ) -> Vec<Vec<Vec<u64>>>;
}
