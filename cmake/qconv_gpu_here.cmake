# The GPUs of this machine, and what kernels are compiled to for them.

# Sets out to the compute capabilities of the GPUs that are here, "80;90", to "unknown" where there are some
# that do not tell (nvidia-smi is missing, or older than this question), or to "" where there is none.
function(qconv_gpu_here out)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE said ERROR_QUIET RESULT_VARIABLE rc)
  string(REGEX MATCHALL "[0-9]+[.][0-9]" capabilities "${said}")
  if(rc EQUAL 0 AND capabilities)
    string(REPLACE "." "" capabilities "${capabilities}")
    list(REMOVE_DUPLICATES capabilities)
    list(SORT capabilities COMPARE NATURAL)
    set(${out} "${capabilities}" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND nvidia-smi -L OUTPUT_VARIABLE said ERROR_QUIET RESULT_VARIABLE rc)
  if(EXISTS /dev/nvidia0 OR (rc EQUAL 0 AND said MATCHES "GPU 0"))
    set(${out} unknown PARENT_SCOPE)
  else()
    set(${out} "" PARENT_SCOPE)
  endif()
endfunction()

# Sets out to CMAKE_CUDA_ARCHITECTURES for these capabilities, where codes is what nvcc --list-gpu-code
# prints: machine code where this nvcc can make it, PTX for a newer GPU. What is older than sm_70, or than
# nvcc has, gets nothing.
function(qconv_gpu_code out capabilities codes)
  set(newest 0)
  string(REGEX MATCHALL "sm_[0-9]+" codes "${codes}")
  foreach(code ${codes})
    string(SUBSTRING ${code} 3 -1 number)
    if(number GREATER newest)
      set(newest ${number})
    endif()
  endforeach()
  set(found)
  foreach(capability ${capabilities})
    if("sm_${capability}" IN_LIST codes AND NOT capability LESS 70)
      list(APPEND found ${capability}-real)
    elseif(capability GREATER newest AND NOT newest LESS 90)
      list(APPEND found 90-virtual)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES found)
  set(${out} "${found}" PARENT_SCOPE)
endfunction()
