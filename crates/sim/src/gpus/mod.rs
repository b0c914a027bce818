//! STUB: the other branch has the real one.
use crate::error::{Error, Result, Stall};
use crate::memory::Memory;
use crate::simulation::Simulation;
use std::rc::Rc;
pub(crate) mod limits {
    pub(crate) const GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];
    pub(crate) const BLOCK: [u32; 3] = [1024, 1024, 64];
    pub(crate) const BLOCK_THREADS: u32 = 1024;
    pub(crate) const BLOCK_REGISTERS: u32 = 65536;
    pub(crate) const STATIC_SHARED: u32 = 48 << 10;
    pub(crate) const BLOCK_SHARED: u32 = 227 << 10;
    pub(crate) fn blocks_per_multiprocessor(_threads: u32, _shared: usize) -> u32 {
        1
    }
}
pub(crate) struct Launch {
    pub(crate) kernel: &'static str,
    pub(crate) gpu: usize,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: usize,
    pub(crate) cooperative: bool,
    pub(crate) body: Rc<dyn Fn()>,
}
#[derive(Clone, Copy)]
pub(crate) struct GridId(u32);
pub(crate) enum Step {
    Progress,
    Idle,
    Stuck,
    Spinning,
    Failed(Error),
}
pub(crate) struct Gpus;
impl Gpus {
    pub(crate) fn new(_: &Simulation, _: Rc<Memory>) -> Self {
        Self
    }
    pub(crate) fn check(&self, _: &Launch) -> Result<()> {
        Ok(())
    }
    pub(crate) fn launch(&self, _: Launch) -> Result<GridId> {
        Ok(GridId(0))
    }
    pub(crate) fn step(&self) -> Step {
        Step::Idle
    }
    pub(crate) fn is_done(&self, _: GridId) -> bool {
        true
    }
    pub(crate) fn reset(&self) {}
    pub(crate) fn clock(&self) -> u64 {
        0
    }
    pub(crate) fn next_deadline(&self) -> Option<u64> {
        None
    }
    pub(crate) fn advance(&self, _: u64) {}
    pub(crate) fn stall(&self) -> Box<Stall> {
        unreachable!()
    }
    pub(crate) fn take_printed(&self) -> String {
        String::new()
    }
}
