//! placeholder
use crate::device::{Device, DeviceConfig};
use crate::error::IoError;
use crate::file::FileSet;
use crate::pool::SlabPool;
use std::sync::Arc;
pub(crate) fn open(
    _: &DeviceConfig,
    _: Arc<FileSet>,
    _: &SlabPool,
) -> Result<Box<dyn Device>, IoError> {
    Err(IoError::RingRefused {
        step: "setup",
        errno: crate::error::Errno(libc::ENOSYS),
        remedy: "use --device threads".to_owned(),
    })
}
