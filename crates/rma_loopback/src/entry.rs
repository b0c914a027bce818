//! The functions of the plugin's tables, which NCCL calls. None unwinds.
//!
//! A pointer that NCCL passes was returned by one of these functions, or is an out pointer that is
//! valid during the call. This contract of the interface justifies every `SAFETY` comment below.

use std::ffi::{CStr, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::abi::{
    self, HANDLE_BYTES, Logger, NetProperties, NetVDeviceProps, Opaque, RmaConfig, RmaProperties,
    Status,
};
use crate::comm::Comm;
use crate::context::{Context, MAX_RECVS, RegionOffset, SignalRequest};
use crate::driver::{RelaxedCaptures, relax_captures};
use crate::endpoint::Endpoint;
use crate::error::{Error, Result};
use crate::log;
use crate::setup::Setup;

pub(crate) const NAME: &CStr = c"devcomm loopback";
/// One device per GIN connection (`DEVCOMM_GIN_CONNECTIONS`), with names that no network card has.
const DEVICES: [&CStr; 4] = [c"gin_loop0", c"gin_loop1", c"gin_loop2", c"gin_loop3"];

/// Converts a panic to an error.
fn catch_panic(body: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(Error::Internal(format!("panicked: {}", text.unwrap_or("no message"))))
    })
}

/// Converts errors and panics to NCCL's codes, and logs them.
fn entry(call: &str, body: impl FnOnce() -> Result<()>) -> Status {
    match catch_panic(body) {
        Ok(()) => abi::SUCCESS,
        Err(error) => {
            log::error(format_args!("{call}: {error}"));
            error.status()
        }
    }
}

/// Sets an out parameter.
///
/// # Safety
///
/// `to` is null or valid for a write.
unsafe fn set_out<T>(to: *mut T, value: T) -> Result<()> {
    if to.is_null() {
        return Err(Error::Argument("an out parameter is null".to_owned()));
    }
    // SAFETY: the pointer is not null, so it is valid for a write, as the caller promises.
    unsafe { to.write(value) };
    Ok(())
}

/// Returns the object behind one of the plugin's pointers.
///
/// # Safety
///
/// `pointer` is null, or was returned by this plugin as a `T` that is still open.
unsafe fn object<'a, T>(pointer: Opaque) -> Result<&'a T> {
    // SAFETY: NCCL passes a pointer that this plugin gave it and that is not closed.
    unsafe { pointer.cast::<T>().as_ref() }
        .ok_or_else(|| Error::Argument("an object of the plugin is null".to_owned()))
}

/// Does the same as [`entry`], for calls of NCCL's progress threads on a connection or a context:
/// an error or a panic fails the connection. The threads continue to call after that, so the error
/// is logged only once.
///
/// # Safety
///
/// `pointer` is null, or was returned by this plugin as a `T` that is still open.
unsafe fn operation<T: AsRef<Comm>>(
    call: &str,
    pointer: Opaque,
    body: impl FnOnce(&T) -> Result<()>,
) -> Status {
    // SAFETY: NCCL passes a pointer that this plugin gave it and that is not closed.
    let target = match unsafe { object::<T>(pointer) } {
        Ok(target) => target,
        Err(error) => return entry(call, || Err(error)),
    };
    let comm = target.as_ref();
    relax_captures(&comm.me.device().driver);
    let had_failed = comm.failed();
    match catch_panic(|| body(target)).map_err(|error| comm.fail(error)) {
        Err(error) if had_failed => error.status(),
        result => entry(call, || result),
    }
}

pub(crate) unsafe extern "C" fn init(
    ctx: *mut Opaque,
    _comm: u64,
    _logger: Option<Logger>,
) -> Status {
    entry("init", || {
        Setup::current()?;
        // Any value serves: no function uses it, and NCCL may pass another pointer.
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(ctx, NAME.as_ptr().cast_mut().cast()) }
    })
}

pub(crate) unsafe extern "C" fn devices(count: *mut c_int) -> Status {
    entry("devices", || {
        let connections = Setup::current()?.config.connections;
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(count, connections) }
    })
}

pub(crate) unsafe extern "C" fn get_rma_properties(
    _comm: Opaque,
    properties: *mut RmaProperties,
) -> Status {
    entry("getRmaProperties", || {
        // A signal covers the puts into its own rank only.
        let value = RmaProperties { flushes_all_puts_on_any_signal: false };
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(properties, value) }
    })
}

pub(crate) unsafe extern "C" fn get_properties(
    device: c_int,
    properties: *mut NetProperties,
) -> Status {
    entry("getProperties", || {
        let name = usize::try_from(device).ok().and_then(|device| DEVICES.get(device));
        let name = name.ok_or_else(|| Error::Argument(format!("no device {device}")))?;
        let mut devs = [0; 8];
        devs[0] = device;
        let all = NetProperties {
            name: name.as_ptr(),
            pci_path: std::ptr::null(),
            guid: device as u64,
            ptr_support: abi::PTR_HOST | abi::PTR_CUDA | abi::PTR_DMABUF,
            reg_is_global: 0,
            force_flush: 0,
            speed: 100_000, // Mbit/s
            port: 0,
            latency: 0.0,
            // The plugin has no limit of these, nor of bytes below.
            max_comms: 1 << 20,
            max_recvs: MAX_RECVS as c_int,
            net_device_type: abi::NET_DEVICE_GIN_PROXY,
            net_device_version: 0,
            v_props: NetVDeviceProps { ndevs: 1, devs },
            max_p2p_bytes: 1 << 40,
            max_coll_bytes: 1 << 40,
            max_multi_request_size: 1,
            rail_id: -1, // none
            plane_id: -1,
        };
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(properties, all) }
    })
}

pub(crate) unsafe extern "C" fn listen(
    _ctx: Opaque,
    _device: c_int,
    handle: Opaque,
    listen_comm: *mut Opaque,
) -> Status {
    entry("listen", || {
        let endpoint = Endpoint::open(Setup::current()?)?;
        // SAFETY: NCCL passes a valid out pointer to `HANDLE_BYTES` bytes.
        unsafe { set_out(handle.cast::<[u8; HANDLE_BYTES]>(), endpoint.handle.to_bytes())? };
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(listen_comm, Box::into_raw(Box::new(endpoint)).cast()) }
    })
}

pub(crate) unsafe extern "C" fn connect(
    _ctx: Opaque,
    handles: *mut Opaque,
    n_ranks: c_int,
    rank: c_int,
    listen_comm: Opaque,
    comm: *mut Opaque,
) -> Status {
    entry("connect", || {
        // SAFETY: `listen` returned the pointer, and it is not closed yet.
        let endpoint = unsafe { object::<Endpoint>(listen_comm)? };
        let _relaxed = RelaxedCaptures::new(&endpoint.setup.driver);
        let (Ok(n_ranks), Ok(rank)) = (usize::try_from(n_ranks), usize::try_from(rank)) else {
            return Err(Error::Argument(format!("rank {rank} of {n_ranks} is out of range")));
        };
        let handles = (0..n_ranks)
            // SAFETY: NCCL passes `n_ranks` pointers to handles, which are live during this call.
            .map(|rank| unsafe { *(*handles.add(rank)).cast::<[u8; HANDLE_BYTES]>() })
            .collect::<Vec<_>>();
        let connected = Comm::connect(endpoint, &handles, rank)?;
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(comm, Box::into_raw(Box::new(connected)).cast()) }
    })
}

pub(crate) unsafe extern "C" fn create_context(
    comm: Opaque,
    config: *mut RmaConfig,
    context: *mut Opaque,
) -> Status {
    entry("createContext", || {
        // SAFETY: `connect` returned the pointer, and it is not closed yet.
        let comm = unsafe { object::<Arc<Comm>>(comm)? };
        // SAFETY: NCCL passes a pointer to a live configuration.
        let config = unsafe { object::<RmaConfig>(config.cast())? };
        let created = Box::new(Context::new(comm, config.n_contexts)?);
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(context, Box::into_raw(created).cast()) }
    })
}

pub(crate) unsafe extern "C" fn reg_mr_sym(
    comm: Opaque,
    data: Opaque,
    bytes: usize,
    memory: c_int,
    flags: u64,
    region: *mut Opaque,
) -> Status {
    entry("regMrSym", || {
        // SAFETY: `connect` returned the pointer, and it is not closed yet.
        let handle = unsafe { object::<Arc<Comm>>(comm)? }.register(data, bytes, memory, flags)?;
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(region, handle) }
    })
}

/// Ignores the file descriptor, which is not needed: copies use addresses.
pub(crate) unsafe extern "C" fn reg_mr_sym_dma_buf(
    comm: Opaque,
    data: Opaque,
    bytes: usize,
    memory: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    region: *mut Opaque,
) -> Status {
    // SAFETY: NCCL passes pointers of this plugin's and valid out pointers, as the interface says.
    unsafe { reg_mr_sym(comm, data, bytes, memory, flags, region) }
}

pub(crate) unsafe extern "C" fn dereg_mr_sym(comm: Opaque, region: Opaque) -> Status {
    entry("deregMrSym", || {
        // SAFETY: `connect` returned the pointer, and it is not closed yet.
        let comm = unsafe { object::<Arc<Comm>>(comm)? };
        let _relaxed = RelaxedCaptures::new(&comm.me.device().driver);
        comm.deregister(region)
    })
}

/// Takes back an object that was passed to NCCL as a box.
///
/// # Safety
///
/// `pointer` is null, or was returned by this plugin as a boxed `T`, and is not used again.
unsafe fn take_box<T>(pointer: Opaque) -> Option<Box<T>> {
    // SAFETY: NCCL passes a pointer that this plugin gave it and that is not closed.
    (!pointer.is_null()).then(|| unsafe { Box::from_raw(pointer.cast::<T>()) })
}

pub(crate) unsafe extern "C" fn destroy_context(context: Opaque) -> Status {
    entry("destroyContext", || {
        // SAFETY: `create_context` returned the pointer; NCCL does not use it again.
        if let Some(context) = unsafe { take_box::<Context>(context) } {
            let _relaxed = RelaxedCaptures::new(&context.comm.me.device().driver);
            drop(context);
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn close_coll(comm: Opaque) -> Status {
    entry("closeColl", || {
        // SAFETY: `connect` returned the pointer; NCCL does not use it again.
        if let Some(comm) = unsafe { take_box::<Arc<Comm>>(comm) } {
            let _relaxed = RelaxedCaptures::new(&comm.me.device().driver);
            comm.close();
            drop(comm);
        }
        Ok(())
    })
}

pub(crate) unsafe extern "C" fn close_listen(listen_comm: Opaque) -> Status {
    entry("closeListen", || {
        // SAFETY: `listen` returned the pointer; NCCL does not use it again.
        drop(unsafe { take_box::<Endpoint>(listen_comm) });
        Ok(())
    })
}

/// Runs an operation of a context and returns its request.
///
/// # Safety
///
/// `create_context` returned `context`, which is live; `request` is null or valid for a write.
unsafe fn request(
    call: &str,
    context: Opaque,
    request: *mut Opaque,
    body: impl FnOnce(&Context) -> Result<Opaque>,
) -> Status {
    let body = |context: &Context| {
        let handle = body(context)?;
        // SAFETY: NCCL passes a pointer that this plugin gave it and that is not closed.
        unsafe { set_out(request, handle) }
    };
    // SAFETY: NCCL passes a pointer that this plugin gave it and that is not closed.
    unsafe { operation(call, context, body) }
}

/// Declares an operation of a context, and its form before version 15 of the plugin interface,
/// without flags.
macro_rules! with_v14 {
    ($name:ident, $name_v14:ident($($arg:ident: $type:ty,)*) as $call:literal, $body:expr) => {
        pub(crate) unsafe extern "C" fn $name(
            context: Opaque,
            $($arg: $type,)*
            _opt_flags: u32,
            out: *mut Opaque,
        ) -> Status {
            // SAFETY: NCCL passes pointers of this plugin's and valid out pointers, as the
            // interface says.
            unsafe { request($call, context, out, $body) }
        }

        pub(crate) unsafe extern "C" fn $name_v14(
            context: Opaque,
            $($arg: $type,)*
            out: *mut Opaque,
        ) -> Status {
            // SAFETY: NCCL passes pointers of this plugin's and valid out pointers, as the
            // interface says.
            unsafe { $name(context, $($arg,)* 0, out) }
        }
    };
}

with_v14! {
    iput, iput_v14(
        index: c_int,
        src_off: u64,
        src: Opaque,
        bytes: usize,
        dst_off: u64,
        dst: Opaque,
        rank: u32,
    ) as "iput",
    |context| {
        let (from, to) = (RegionOffset::new(src, src_off), RegionOffset::new(dst, dst_off));
        context.put(index, from, bytes, to, rank, None)
    }
}

// `_strong` is ignored: every signal is strong.
with_v14! {
    iput_signal, iput_signal_v14(
        index: c_int,
        src_off: u64,
        src: Opaque,
        bytes: usize,
        dst_off: u64,
        dst: Opaque,
        rank: u32,
        signal_off: u64,
        signal: Opaque,
        value: u64,
        op: u32,
        _strong: bool,
    ) as "iputSignal",
    |context| {
        let (from, to) = (RegionOffset::new(src, src_off), RegionOffset::new(dst, dst_off));
        let at = RegionOffset::new(signal, signal_off);
        let signal = SignalRequest { at, value, operation: op };
        context.put(index, from, bytes, to, rank, Some(signal))
    }
}

with_v14! {
    iget, iget_v14(
        index: c_int,
        remote_off: u64,
        remote: Opaque,
        bytes: usize,
        local_off: u64,
        local: Opaque,
        rank: u32,
    ) as "iget",
    |context| {
        let from = RegionOffset::new(remote, remote_off);
        context.get(index, from, bytes, RegionOffset::new(local, local_off), rank)
    }
}

/// Does nothing: a get is complete only when its data is visible to kernels. The
/// request is null, and NCCL does not test it.
pub(crate) unsafe extern "C" fn iflush(
    _context: Opaque,
    _index: c_int,
    _region: Opaque,
    _rank: u32,
    out: *mut Opaque,
) -> Status {
    // SAFETY: NCCL passes a valid out pointer.
    entry("iflush", || unsafe { set_out(out, std::ptr::null_mut()) })
}

pub(crate) unsafe extern "C" fn test(comm: Opaque, request: Opaque, done: *mut c_int) -> Status {
    let body = |comm: &Arc<Comm>| {
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(done, 0)? };
        let complete = comm.test(request)?;
        // SAFETY: NCCL passes pointers of this plugin's and valid out pointers, as the interface
        // says.
        unsafe { set_out(done, c_int::from(complete)) }
    };
    // SAFETY: `connect` returned the pointer, and it is not closed yet.
    unsafe { operation("test", comm, body) }
}

pub(crate) unsafe extern "C" fn rma_progress(context: Opaque) -> Status {
    // SAFETY: `create_context` returned the pointer, and it is not destroyed yet.
    unsafe { operation("rmaProgress", context, |context: &Context| context.comm.progress()) }
}

pub(crate) unsafe extern "C" fn query_last_error(context: Opaque, has_error: *mut bool) -> Status {
    entry("queryLastError", || {
        // SAFETY: `create_context` returned the pointer, and it is not destroyed yet.
        let failed = unsafe { object::<Context>(context)? }.comm.failed();
        // SAFETY: NCCL passes a valid out pointer.
        unsafe { set_out(has_error, failed) }
    })
}

/// Does nothing: all state belongs to connections. NCCL calls it twice for each communicator.
pub(crate) unsafe extern "C" fn finalize(_ctx: Opaque) -> Status {
    abi::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_error_with_its_message() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let result = catch_panic(|| panic!("of {}", 1));
        std::panic::set_hook(hook);
        assert_eq!(result, Err(Error::Internal("panicked: of 1".to_owned())));
    }
}
