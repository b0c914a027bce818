//! A loaded NCCL library, and the operations on its communicators.

pub(crate) mod abi;
#[cfg(test)]
mod abi_tests;
pub(crate) mod functions;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use devcomm_locate::NcclVersion;
use devcomm_types::{DataType, DevComm};

use self::abi::{
    CommProperties, RawComm, RawUniqueId, RawWindow, Requirements, SUCCESS, WIN_COLL_SYMMETRIC,
};
use self::functions::Slots;
use super::cuda::RawStream;
use crate::{Error, ReduceOp, Result};

/// NCCL's library. Once one is in use it stays loaded for the life of the process: NCCL keeps
/// threads of its own running in it.
pub(crate) struct Nccl {
    library: libloading::Library,
    path: PathBuf,
    version: NcclVersion,
    slots: Slots,
}

/// A live communicator. `destroy` and `abort` take it by value.
pub(crate) struct Comm {
    raw: RawComm,
    rank: usize,
}

/// Device memory from `ncclMemAlloc`.
pub(crate) struct Allocation {
    address: *mut c_void,
}

impl Allocation {
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }
}

/// A registered window.
pub(crate) struct WindowHandle {
    raw: RawWindow,
}

impl WindowHandle {
    /// The device address that kernels take.
    pub(crate) fn device_handle(&self) -> *mut c_void {
        self.raw
    }
}

const HINT: &str = "run again with NCCL_DEBUG=INFO for NCCL's own log";

impl Nccl {
    /// Loads the library at `path` and asks its version; nothing of it is initialised.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let unusable = |reason: String| Error::NcclUnusable { path: path.to_owned(), reason };
        // SAFETY: loading runs the library's initialisers. The path comes from the search for NCCL
        // or from the caller, who vouches for the file as for any code of the program.
        let library = unsafe { libloading::Library::new(path) }
            .map_err(|error| unusable(error.to_string()))?;
        let mut code: c_int = 0;
        let status = {
            // SAFETY: the prototype of ncclGetVersion has been this one since NCCL 2.3.
            let get_version = unsafe {
                library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0")
            };
            let get_version =
                get_version.map_err(|_| unusable("it has no ncclGetVersion".to_owned()))?;
            // SAFETY: the argument is a live int.
            unsafe { get_version(&raw mut code) }
        };
        match u32::try_from(code) {
            Ok(code) if status == SUCCESS && code > 0 => Ok(Self {
                library,
                path: path.to_owned(),
                version: NcclVersion::from_code(code),
                slots: Slots::default(),
            }),
            _ => Err(unusable(format!("ncclGetVersion returned {status} and version {code}"))),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn version(&self) -> NcclVersion {
        self.version
    }

    /// Refuses `what` unless the library is at least of version `needs`.
    pub(crate) fn require(&self, what: &'static str, needs: NcclVersion) -> Result<()> {
        if self.version < needs { Err(self.lacks(what, needs)) } else { Ok(()) }
    }

    fn lacks(&self, what: &'static str, needs: NcclVersion) -> Error {
        Error::Unsupported { what, needs, has: self.version }
    }

    /// Looks up a function.
    ///
    /// # Safety
    ///
    /// `F` is a function pointer of the symbol's C prototype.
    pub(crate) unsafe fn symbol<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller vouches for the type.
        unsafe { self.library.get::<F>(name) }.ok().map(|symbol| *symbol)
    }

    /// Turns a result code into an error with everything that NCCL says about it.
    fn check(&self, operation: &'static str, code: c_int, rank: Option<usize>) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: any code is allowed; the text is a constant of the library.
        let text = unsafe { self.get_error_string(code).map(|text| text_of(text)) };
        // SAFETY: NULL is an allowed communicator; the text belongs to the library and is copied
        // before this thread calls it again.
        let last_error = unsafe { self.get_last_error(null_mut()).map(|text| text_of(text)) };
        Err(Error::Nccl {
            operation,
            code,
            text: text.unwrap_or_else(|_| "no text".to_owned()),
            last_error: last_error.unwrap_or_default(),
            rank,
            hint: HINT,
        })
    }

    pub(crate) fn unique_id(&self) -> Result<RawUniqueId> {
        let mut id = RawUniqueId([0; 128]);
        // SAFETY: `id` is a live ncclUniqueId.
        let code = unsafe { self.get_unique_id(&raw mut id)? };
        self.check("ncclGetUniqueId", code, None)?;
        Ok(id)
    }

    /// Joins a communicator; the calling thread's CUDA context is the rank's device. Blocks until
    /// every rank has joined.
    pub(crate) fn init_rank(&self, id: &RawUniqueId, rank: usize, n_ranks: usize) -> Result<Comm> {
        let (Ok(c_rank), Ok(c_n_ranks)) = (c_int::try_from(rank), c_int::try_from(n_ranks)) else {
            return Err(Error::invalid(format!(
                "rank {rank} of {n_ranks} does not fit NCCL's int"
            )));
        };
        let mut raw: RawComm = null_mut();
        // SAFETY: `raw` is live for the call and the id is passed by value.
        let code = unsafe { self.comm_init_rank(&raw mut raw, c_n_ranks, *id, c_rank)? };
        self.check("ncclCommInitRank", code, Some(rank))?;
        if raw.is_null() {
            return Err(Error::Nccl {
                operation: "ncclCommInitRank",
                code,
                text: "success, but no communicator".to_owned(),
                last_error: String::new(),
                rank: Some(rank),
                hint: HINT,
            });
        }
        Ok(Comm { raw, rank })
    }

    /// Finishes what is outstanding on every rank, then frees the communicator. One that cannot be
    /// finished is aborted.
    pub(crate) fn destroy(&self, comm: Comm) -> Result<()> {
        // SAFETY: the handle is live.
        let code = unsafe { self.comm_finalize(comm.raw)? };
        if let Err(error) = self.check("ncclCommFinalize", code, Some(comm.rank)) {
            tracing::warn!("{error}; aborting the communicator");
            return self.abort(comm);
        }
        // SAFETY: the handle is live and, taken by value, not used again.
        let code = unsafe { self.comm_destroy(comm.raw)? };
        self.check("ncclCommDestroy", code, Some(comm.rank))
    }

    /// Frees the communicator without asking the other ranks.
    pub(crate) fn abort(&self, comm: Comm) -> Result<()> {
        // SAFETY: the handle is live and, taken by value, not used again.
        let code = unsafe { self.comm_abort(comm.raw)? };
        self.check("ncclCommAbort", code, Some(comm.rank))
    }

    pub(crate) fn async_error(&self, comm: &Comm) -> Result<()> {
        let mut state = SUCCESS;
        // SAFETY: the handle is live, `state` too.
        let code = unsafe { self.comm_get_async_error(comm.raw, &raw mut state)? };
        self.check("ncclCommGetAsyncError", code, Some(comm.rank))?;
        self.check("an asynchronous NCCL operation", state, Some(comm.rank))
    }

    /// The communicator's own (rank, ranks, CUDA device).
    pub(crate) fn identity(&self, comm: &Comm) -> Result<(c_int, c_int, c_int)> {
        let (mut rank, mut count, mut device) = (0, 0, 0);
        // SAFETY: the handle is live and `rank` is a live int.
        let code = unsafe { self.comm_user_rank(comm.raw, &raw mut rank)? };
        self.check("ncclCommUserRank", code, Some(comm.rank))?;
        // SAFETY: as above.
        let code = unsafe { self.comm_count(comm.raw, &raw mut count)? };
        self.check("ncclCommCount", code, Some(comm.rank))?;
        // SAFETY: as above.
        let code = unsafe { self.comm_cu_device(comm.raw, &raw mut device)? };
        self.check("ncclCommCuDevice", code, Some(comm.rank))?;
        Ok((rank, count, device))
    }

    pub(crate) fn properties(&self, comm: &Comm) -> Result<CommProperties> {
        // The struct that an older library fills is shorter or laid out otherwise.
        self.require("ncclCommQueryProperties (as of 2.32.3)", crate::library::DEV_COMM_VERSION)?;
        let mut properties = CommProperties::new();
        // SAFETY: the handle is live; the struct says its own size and version, which the library
        // has just been found to know.
        let code = unsafe { self.comm_query_properties(comm.raw, &raw mut properties)? };
        self.check("ncclCommQueryProperties", code, Some(comm.rank))?;
        Ok(properties)
    }

    /// Allocates on the current context's device.
    pub(crate) fn alloc(&self, bytes: usize) -> Result<Allocation> {
        let mut address = null_mut();
        // SAFETY: `address` is a live pointer.
        let code = unsafe { self.mem_alloc(&raw mut address, bytes)? };
        self.check("ncclMemAlloc", code, None)?;
        if address.is_null() {
            return Err(Error::invalid(format!("ncclMemAlloc gave no memory for {bytes} bytes")));
        }
        Ok(Allocation { address })
    }

    /// Frees memory.
    ///
    /// # Safety
    ///
    /// Nothing on this GPU or on a peer uses the memory any more, and no window is registered over it.
    pub(crate) unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        // SAFETY: the address came from ncclMemAlloc, and the allocation is taken by value; the
        // caller vouches for the users.
        let code = unsafe { self.mem_free(allocation.address)? };
        self.check("ncclMemFree", code, None)
    }

    /// Registers a symmetric window over the first `bytes` of `memory`; every rank calls it. `None`
    /// when NCCL has no symmetric memory here.
    pub(crate) fn register(
        &self,
        comm: &Comm,
        memory: &Allocation,
        bytes: usize,
    ) -> Result<Option<WindowHandle>> {
        let mut raw: RawWindow = null_mut();
        // SAFETY: communicator and allocation are live, and `bytes` is at most what was allocated:
        // `memory::Memory` keeps the two together.
        let code = unsafe {
            self.comm_window_register(
                comm.raw,
                memory.address,
                bytes,
                &raw mut raw,
                WIN_COLL_SYMMETRIC,
            )?
        };
        self.check("ncclCommWindowRegister", code, Some(comm.rank))?;
        Ok((!raw.is_null()).then_some(WindowHandle { raw }))
    }

    /// Ends a window.
    ///
    /// # Safety
    ///
    /// No kernel uses the window any more.
    pub(crate) unsafe fn deregister(&self, comm: &Comm, window: WindowHandle) -> Result<()> {
        // SAFETY: both handles are live, the window is taken by value; the caller vouches for kernels.
        let code = unsafe { self.comm_window_deregister(comm.raw, window.raw)? };
        self.check("ncclCommWindowDeregister", code, Some(comm.rank))
    }

    /// Makes a device communicator; every rank calls it with the same requirements.
    pub(crate) fn create_dev_comm(
        &self,
        comm: &Comm,
        requirements: &Requirements,
    ) -> Result<DevComm> {
        let mut dev_comm = DevComm::zeroed();
        // SAFETY: the handle is live; the requirements carry the size and version of the struct that
        // they are, and the version makes NCCL write a DevComm of exactly that layout. Their lists
        // are empty or live for the call. Outside a group the output is written before it returns.
        let code = unsafe {
            Self::dev_comm_create(self, comm.raw, &raw const *requirements, &raw mut dev_comm)?
        };
        self.check("ncclDevCommCreate", code, Some(comm.rank))?;
        Ok(dev_comm)
    }

    /// Frees a device communicator.
    ///
    /// # Safety
    ///
    /// It came from `create_dev_comm` of the same communicator, is destroyed once, and no kernel uses it.
    pub(crate) unsafe fn destroy_dev_comm(&self, comm: &Comm, dev_comm: &DevComm) -> Result<()> {
        // SAFETY: the caller vouches for the device communicator; the handle is live.
        let code = unsafe { self.dev_comm_destroy(comm.raw, &raw const *dev_comm)? };
        self.check("ncclDevCommDestroy", code, Some(comm.rank))
    }

    /// Enqueues an all-reduce.
    ///
    /// # Safety
    ///
    /// Both addresses hold `count` elements of `data_type` on the communicator's device and stay
    /// allocated until the stream has passed the operation.
    #[expect(clippy::too_many_arguments, reason = "the arguments are NCCL's")]
    pub(crate) unsafe fn enqueue_all_reduce(
        &self,
        comm: &Comm,
        send: u64,
        recv: u64,
        count: usize,
        data_type: DataType,
        op: ReduceOp,
        stream: RawStream,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the memory; communicator and stream are live.
        let code = unsafe {
            self.all_reduce(
                send as *const c_void,
                recv as *mut c_void,
                count,
                data_type as c_int,
                op as c_int,
                comm.raw,
                stream.cast(),
            )?
        };
        self.check("ncclAllReduce", code, Some(comm.rank))
    }
}

/// Copies a C string; NULL is empty.
///
/// # Safety
///
/// The pointer is NULL or a live NUL-terminated string.
unsafe fn text_of(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not NULL, so by the caller's word a live string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
