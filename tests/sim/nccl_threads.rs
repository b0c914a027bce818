//! Helpers for tests that call the simulator's NCCL and driver functions, on one thread per GPU.

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use devcomm_sim::{Machine, Simulation};
use devcomm_sys::driver::{
    CUgraph, CUgraphExec, CUlaunchConfig, CUmodule, CUresult, CUstream, CUstreamCaptureMode,
};
use devcomm_sys::nccl::{Config, RawComm, RawStream, RawUniqueId};
use devcomm_types::HostBody;

/// Calls a function of the simulated NCCL.
macro_rules! nccl {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the handles and memory are live, or such that the machine refuses them.
        unsafe { devcomm_sim::Machine::nccl().$function.unwrap()($($argument),*) }
    };
}
pub(crate) use nccl;

/// Calls a function of the simulated driver.
macro_rules! cuda {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: the tests pass arguments that keep the function's contract.
        unsafe { devcomm_sim::Machine::driver().$function($($argument),*) }
    };
}
pub(crate) use cuda;

/// NCCL's numbers of a data type, an operator and results.
pub const F32: c_int = 7;
pub const SUM: c_int = 0;
pub const SYSTEM_ERROR: c_int = 2;
pub const INTERNAL_ERROR: c_int = 3;
pub const INVALID_ARGUMENT: c_int = 4;
pub const INVALID_USAGE: c_int = 5;
pub const REMOTE_ERROR: c_int = 6;
pub const IN_PROGRESS: c_int = 7;

pub const OK: CUresult = CUresult::CUDA_SUCCESS;

/// A host thread of rank `me`, with the context of GPU `me` current.
pub struct Thread {
    pub me: usize,
    n: usize,
    pub machine: Machine,
    /// The module of the kernels that it launches.
    pub module: CUmodule,
    /// The unique id of a communicator of all threads.
    id: RawUniqueId,
    /// Addresses from `ncclMemAlloc`, freed when the `Thread` is dropped.
    memory: Cell<Vec<usize>>,
}

fn unique_id(machine: &Machine) -> RawUniqueId {
    let (_attached, mut id) = (machine.ticket("makes an id").attach(), RawUniqueId([0; 128]));
    ok(nccl!(get_unique_id(&raw mut id)));
    id
}

/// Runs `f` on one thread per GPU of a new machine; returns the results in the order of the GPUs.
pub fn run_ranks<T: Send>(simulation: Simulation, f: impl Fn(&Thread) -> T + Sync) -> Vec<T> {
    run_ranks_on(&Machine::new(&simulation).unwrap(), f)
}

/// Does the same as [`run_ranks`], on a machine of the test.
pub fn run_ranks_on<T: Send>(machine: &Machine, f: impl Fn(&Thread) -> T + Sync) -> Vec<T> {
    let (n, id, f) = (machine.gpus(), unique_id(machine), &f);
    std::thread::scope(|scope| {
        let tickets: Vec<_> = (0..n).map(|rank| machine.ticket(format!("rank {rank}"))).collect();
        let start = |(me, ticket): (usize, devcomm_sim::Ticket)| {
            scope.spawn(move || {
                let _attached = ticket.attach();
                retain(me);
                let (machine, module) = (machine.clone(), machine.load_module());
                f(&Thread { me, n, machine, module, id, memory: Cell::default() })
            })
        };
        let threads: Vec<_> = tickets.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Makes a GPU's context current.
pub fn retain(gpu: usize) {
    let mut context = null_mut();
    assert_eq!(cuda!(cuDevicePrimaryCtxRetain(&raw mut context, gpu as i32)), OK);
    assert_eq!(cuda!(cuCtxSetCurrent(context)), OK);
}

fn last_error(comm: RawComm) -> String {
    let text = nccl!(get_last_error(comm));
    // SAFETY: the text is valid until the thread's next call.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

#[track_caller]
pub fn ok(code: c_int) {
    assert_eq!(code, 0, "{}", last_error(null_mut()));
}

/// The address of device memory. [`Thread::alloc`] allocates it until the [`Thread`] is dropped.
pub struct Memory(*mut c_void);

impl Memory {
    pub fn at(address: *mut c_void) -> Self {
        Self(address)
    }

    pub fn ptr(&self) -> *mut c_void {
        self.0
    }

    pub fn read<T: Copy>(&self, n: usize) -> Vec<T> {
        let mut data = Vec::<T>::with_capacity(n);
        let bytes = n * size_of::<T>();
        let code =
            cuda!(cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), self.0 as u64, bytes, null_mut()));
        assert_eq!(code, OK);
        // SAFETY: a copy to pageable memory ends before the call returns, so it has written `n`
        // elements; any bits are valid for the tests' types.
        unsafe { data.set_len(n) };
        data
    }

    pub fn write<T: Copy>(&self, data: &[T]) {
        let bytes = size_of_val(data);
        let code =
            cuda!(cuMemcpyHtoDAsync_v2(self.0 as u64, data.as_ptr().cast(), bytes, null_mut()));
        assert_eq!(code, OK);
    }
}

impl Thread {
    /// Returns a communicator of all threads, which call this together.
    pub fn init(&self) -> RawComm {
        let (comm, code) = self.init_with(Config::new());
        ok(code);
        comm
    }

    pub fn init_with(&self, mut config: Config) -> (RawComm, c_int) {
        let mut comm = null_mut();
        let (n, me) = (self.n as c_int, self.me as c_int);
        let (out, config) = (&raw mut comm, &raw mut config);
        let code = nccl!(comm_init_rank_config(out, n, self.id, me, config));
        (comm, code)
    }

    pub fn destroy(&self, comm: RawComm) {
        ok(nccl!(comm_destroy(comm)));
    }

    pub fn abort(&self, comm: RawComm) {
        ok(nccl!(comm_abort(comm)));
    }

    pub fn async_error(&self, comm: RawComm) -> c_int {
        let mut state = -1;
        ok(nccl!(comm_get_async_error(comm, &raw mut state)));
        state
    }

    /// Waits until a non-blocking operation is complete.
    pub fn wait(&self, comm: RawComm) {
        while self.async_error(comm) == IN_PROGRESS {}
        assert_eq!(self.async_error(comm), 0);
    }

    pub fn last_error(&self, comm: RawComm) -> String {
        last_error(comm)
    }

    /// Returns this thread's rank in a communicator, and the communicator's number of ranks.
    pub fn rank_and_size(&self, comm: RawComm) -> (usize, usize) {
        let (mut rank, mut n) = (-1, -1);
        ok(nccl!(comm_user_rank(comm, &raw mut rank)));
        ok(nccl!(comm_count(comm, &raw mut n)));
        (rank as usize, n as usize)
    }

    pub fn stream(&self) -> RawStream {
        let mut stream: CUstream = null_mut();
        assert_eq!(cuda!(cuStreamCreate(&raw mut stream, 1)), OK);
        stream.cast()
    }

    pub fn synchronize(&self, stream: RawStream) {
        assert_eq!(cuda!(cuStreamSynchronize(stream.cast())), OK);
    }

    /// Waits for a stream; returns the driver's error text if that fails.
    pub fn wait_for(&self, stream: RawStream) -> Option<String> {
        let mut text = null();
        let code = cuda!(cuStreamSynchronize(stream.cast()));
        assert_eq!(cuda!(cuGetErrorString(code, &raw mut text)), OK);
        // SAFETY: the text is valid until the thread's next call.
        let text = unsafe { CStr::from_ptr(text) };
        (code != OK).then(|| text.to_str().unwrap().to_owned())
    }

    /// Launches a kernel with parameters at the addresses `params`.
    pub fn launch_kernel(
        &self,
        body: &HostBody,
        (grid, block): (u32, u32),
        stream: RawStream,
        params: &[*const c_void],
    ) {
        let mut params: Vec<_> = params.iter().map(|param| param.cast_mut()).collect();
        let config = CUlaunchConfig {
            gridDimX: grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream.cast(),
            attrs: null_mut(),
            numAttrs: 0,
        };
        let function = self.machine.bind(self.module, body);
        let (config, params) = (&raw const config, params.as_mut_ptr());
        let code = cuda!(cuLaunchKernelEx(config, function, params, null_mut()));
        assert_eq!(code, OK);
    }

    /// Returns pinned memory of the host.
    pub fn pinned(&self, bytes: usize) -> *mut c_void {
        let mut memory = null_mut();
        assert_eq!(cuda!(cuMemHostAlloc(&raw mut memory, bytes, 0)), OK);
        memory
    }

    pub fn capture(&self, stream: RawStream, f: impl FnOnce()) -> CUgraphExec {
        let stream = stream.cast();
        let (mut graph, mut exec): (CUgraph, CUgraphExec) = (null_mut(), null_mut());
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        assert_eq!(cuda!(cuStreamBeginCapture_v2(stream, mode)), OK);
        f();
        assert_eq!(cuda!(cuStreamEndCapture(stream, &raw mut graph)), OK);
        assert_eq!(cuda!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0)), OK);
        exec
    }

    pub fn launch(&self, exec: CUgraphExec, stream: RawStream) {
        assert_eq!(cuda!(cuGraphLaunch(exec, stream.cast())), OK);
    }

    pub fn alloc(&self, bytes: usize) -> Memory {
        let mut memory = null_mut();
        ok(nccl!(mem_alloc(&raw mut memory, bytes)));
        let mut all = self.memory.take();
        all.push(memory.addr());
        self.memory.set(all);
        Memory(memory)
    }

    pub fn filled<T: Copy>(&self, data: &[T]) -> Memory {
        let memory = self.alloc(size_of_val(data));
        memory.write(data);
        memory
    }

    /// Returns memory with `n` zeros of 4 bytes each.
    pub fn zeroed(&self, n: usize) -> Memory {
        self.filled(&vec![0.0_f32; n])
    }

    /// Posts an all-reduce in place; returns NCCL's result code.
    pub fn all_reduce(
        &self,
        memory: &Memory,
        count: usize,
        data_type: c_int,
        op: c_int,
        comm: RawComm,
        stream: RawStream,
    ) -> c_int {
        // SAFETY: invalid handles and memory are refused.
        unsafe {
            let all_reduce = Machine::nccl().all_reduce.unwrap();
            all_reduce(memory.0, memory.0, count, data_type, op, comm, stream)
        }
    }

    /// Synchronises all ranks of a communicator.
    pub fn barrier(&self, comm: RawComm) {
        let (b, stream) = (self.zeroed(1), self.stream());
        ok(self.all_reduce(&b, 1, F32, SUM, comm, stream));
        self.synchronize(stream);
    }

    /// Returns the sum over all ranks' `own`.
    pub fn sum(&self, own: f32, comm: RawComm, stream: RawStream) -> f32 {
        let b = self.filled(&[own]);
        ok(self.all_reduce(&b, 1, F32, SUM, comm, stream));
        self.synchronize(stream);
        b.read(1)[0]
    }

    /// Splits a communicator; returns NULL for a rank without a color (-1).
    pub fn split(&self, comm: RawComm, color: c_int, key: c_int) -> RawComm {
        let mut child = null_mut();
        ok(nccl!(comm_split(comm, color, key, &raw mut child, null_mut())));
        child
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        for memory in self.memory.take() {
            let memory = std::ptr::with_exposed_provenance_mut(memory);
            // A machine that has failed refuses this.
            nccl!(mem_free(memory));
        }
    }
}
