//! Names and messages of driver errors.

use std::cell::RefCell;
use std::ffi::{CString, c_char};

use devcomm_sys::driver::CUresult;
use litemap::LiteMap;
use parking_lot::Mutex;

use super::CudaError;

thread_local! {
    /// The calling thread's last error, if it has a specific message.
    static LAST_ERROR: RefCell<Option<(CUresult, CString)>> = const { RefCell::new(None) };
}

/// Stores an error's message for `cuGetErrorString`.
pub(super) fn set_last_error(error: CudaError) {
    let text = error.text.map(|text| (error.code, c_string(&text)));
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
}

fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', " ")).unwrap_or_default()
}

/// Returns the name of an error, such as `CUDA_ERROR_NOT_READY`, stored for the life of the
/// process.
fn name_of(error: CUresult) -> *const c_char {
    static NAMES: Mutex<LiteMap<u32, CString>> = Mutex::new(LiteMap::new());
    let mut names = NAMES.lock();
    // Names are never removed, and their bytes do not move with the map's entry.
    names.entry(error as u32).or_insert_with(|| c_string(&format!("{error:?}"))).as_ptr()
}

pub(super) unsafe fn error_name(error: CUresult, text: *mut *const c_char) -> CUresult {
    // SAFETY: the program passes a valid out pointer, as CUDA requires.
    unsafe { text.write(name_of(error)) };
    CUresult::CUDA_SUCCESS
}

/// Writes the message of the thread's last error if that has the code `error`, else the code's
/// name. The text is valid until the thread's next call.
pub(super) unsafe fn error_string(error: CUresult, text: *mut *const c_char) -> CUresult {
    let message = |last: &RefCell<Option<(CUresult, CString)>>| {
        let last = last.borrow();
        last.as_ref().filter(|(code, _)| *code == error).map(|(_, text)| text.as_ptr())
    };
    let message = LAST_ERROR.try_with(message).ok().flatten();
    // SAFETY: the program passes a valid out pointer, as CUDA requires.
    unsafe { text.write(message.unwrap_or_else(|| name_of(error))) };
    CUresult::CUDA_SUCCESS
}
